//! The layout against what research and the API say: sentence by sentence, then 10,000 random
//! worlds against a model that knows nothing of tables.

mod cases;
mod plain;
mod random;
mod world;
