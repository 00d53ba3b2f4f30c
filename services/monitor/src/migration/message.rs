//! Payloads of frames.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::MigrationError;

/// The newest version of the protocol.
pub const VERSION: u16 = 5;
/// The oldest supported version.
pub const OLDEST_VERSION: u16 = 3;
/// First bytes of every stream.
const MAGIC: [u8; 8] = *b"CAUSEWAY";

/// The first frame of every stream; its layout never changes.
///
/// ```text
/// offset 0 magic   8 version u16   10 oldest version u16   12 stream u16   14 streams u16   16 migration, 16 bytes
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// The sender's newest version.
    pub version: u16,
    /// The sender's oldest version.
    pub oldest: u16,
    /// Number of this stream, from 0.
    pub stream: u16,
    /// Number of streams.
    pub streams: u16,
    /// Random id of the migration, the same on all its streams.
    pub migration: [u8; 16],
}

impl Hello {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for half in [self.version, self.oldest, self.stream, self.streams] {
            bytes.extend_from_slice(&half.to_le_bytes());
        }
        bytes.extend_from_slice(&self.migration);
        bytes
    }

    /// Decodes a greeting, and selects the newest version that both sides support.
    pub fn decode(bytes: &[u8]) -> Result<(Self, u16), MigrationError> {
        let bad = |what: &str| MigrationError::Protocol(what.to_owned());
        let (Some(magic), Some(migration)) = (bytes.get(..8), bytes.get(16..32)) else {
            return Err(bad("a greeting that is too short"));
        };
        if magic != MAGIC {
            return Err(bad("a greeting of something else than a VM's migration"));
        }
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let migration = migration.try_into().map_err(|_| bad("a greeting that is too short"))?;
        let hello =
            Self { version: half(8), oldest: half(10), stream: half(12), streams: half(14), migration };
        let most = u16::try_from(control_api::migration::MAX_STREAMS).unwrap_or(1);
        if hello.streams == 0 || hello.streams > most || hello.stream >= hello.streams {
            return Err(MigrationError::Protocol(format!(
                "a greeting of stream {} of {}; 1 to {most} are possible",
                hello.stream, hello.streams
            )));
        }
        let version = hello.version.min(VERSION);
        if hello.oldest > hello.version || version < OLDEST_VERSION || version < hello.oldest {
            return Err(MigrationError::Version {
                lowest: hello.oldest,
                highest: hello.version,
                ours_lowest: OLDEST_VERSION,
                ours: VERSION,
            });
        }
        Ok((hello, version))
    }
}

/// The payload of `Accepted`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// The version for the rest of the stream.
    pub version: u16,
    /// The destination's name in its cluster, where a daemon serves devices of the VM. From version 2 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// The payload of `End`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Pages that this stream carried, repeated ones counted again.
    pub pages: u64,
    /// Duration of the blackout so far by the source's monotonic clock, in microseconds. Older sources don't send it.
    #[serde(default, rename = "standing_us", skip_serializing_if = "Option::is_none")]
    pub blackout_us: Option<u64>,
}

/// Encodes as CBOR with field names, so that later versions can add fields.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, MigrationError> {
    let mut bytes = Vec::new();
    ciborium::into_writer(message, &mut bytes)
        .map_err(|error| MigrationError::Protocol(format!("nothing; a message can't be encoded: {error}")))?;
    Ok(bytes)
}

/// Decodes CBOR of the other side.
pub fn decode<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T, MigrationError> {
    ciborium::from_reader(bytes)
        .map_err(|error| MigrationError::Protocol(format!("{what} that can't be understood: {error}")))
}

/// A sentence of the other side, without control characters and limited in length, for a log.
pub fn sentence(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().filter(|letter| !letter.is_control()).take(1000).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(version: u16, oldest: u16) -> Hello {
        Hello { version, oldest, stream: 1, streams: 4, migration: [7; 16] }
    }

    #[test]
    fn greetings_agree_on_a_version() {
        let ours = hello(VERSION, OLDEST_VERSION);
        assert_eq!(Hello::decode(&ours.encode()).unwrap(), (ours, VERSION));
        // A newer side that still supports this version.
        assert_eq!(Hello::decode(&hello(VERSION + 1, VERSION).encode()).unwrap().1, VERSION);
        let error = Hello::decode(&hello(VERSION + 2, VERSION + 1).encode()).unwrap_err();
        assert!(matches!(error, MigrationError::Version { .. }), "{error}");
        assert!(Hello::decode(&hello(0, 0).encode()).is_err());
        assert!(Hello::decode(&hello(1, 2).encode()).is_err());
    }

    #[test]
    fn other_greetings_are_refused() {
        let good = hello(VERSION, OLDEST_VERSION).encode();
        for cut in 0..good.len() {
            assert!(Hello::decode(&good[..cut]).is_err());
        }
        for (at, byte) in [(0, b'c'), (12, 4), (14, 0), (14, 200)] {
            let mut bad = good.clone();
            bad[at] = byte;
            assert!(Hello::decode(&bad).is_err(), "{at}");
        }
    }

    #[test]
    fn a_sentence_has_no_control_characters() {
        assert_eq!(sentence(b"no\x1b[2J\nroom\xff"), "no[2Jroom\u{fffd}");
    }
}
