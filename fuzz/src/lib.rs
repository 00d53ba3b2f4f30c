//! Common code of fuzz targets: small guests with hostile rings, and synthetic kernels.

pub mod kernels;
pub mod ring;
