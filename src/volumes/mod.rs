//! Volumes: contents to files and mounts. They emit mounts as plain data; the runtime consumes them.

pub mod model;
