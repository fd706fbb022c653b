//! ROOM 1: pods from source to status; the only room that knows the others.

pub mod qos;
pub mod translate;
pub mod defaults;
pub mod env;
pub mod source;
pub mod validate;
