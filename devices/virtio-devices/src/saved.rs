//! Encoding of saved states: CBOR with field names, so that a release can omit or add fields and still read another's state.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Serialises saved state.
pub fn encode<T: Serialize>(state: &T) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    ciborium::into_writer(state, &mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}

/// Decodes a saved state. The error names the damaged place.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    ciborium::from_reader(bytes).map_err(|error| error.to_string())
}
