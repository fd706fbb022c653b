//! Status: what is OBSERVED, in the API's words.

pub mod render;
