//! ROOM 1: pods from source to status; the only room that knows the others.

pub mod action;
pub mod agent;
pub mod apply;
pub mod defaults;
pub mod env;
pub mod handle;
pub mod instance;
pub mod logs;
pub mod model;
pub mod observe;
pub mod orphans;
pub mod plan;
pub mod pull_secret;
pub mod pulls;
pub mod qos;
pub mod recover;
pub mod remembered;
pub mod rooms;
pub mod server;
pub mod services;
pub mod source;
pub mod status;
pub mod translate;
pub mod validate;
pub mod views;
pub mod worker;
