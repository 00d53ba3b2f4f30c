//! Page walks of constructed and of random tables.

mod made;
mod memory;
mod random;
