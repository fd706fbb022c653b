//! ROOM 1: pods from source to status; the only room that knows the others.

pub mod agent;
pub mod defaults;
pub mod env;
pub mod handle;
pub mod logs;
pub mod model;
pub mod qos;
pub mod server;
pub mod source;
pub mod translate;
pub mod validate;
