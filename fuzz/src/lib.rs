//! What several fuzz targets share: tiny guests with hostile rings, and made-up kernels.

pub mod kernels;
pub mod ring;
