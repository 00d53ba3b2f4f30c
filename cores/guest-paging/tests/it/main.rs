//! Page walks of made tables and of random ones.

mod made;
mod memory;
mod random;
