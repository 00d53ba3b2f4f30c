//! Where etcd is, and how to speak with it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::kv::Kv;

/// Keys for etcd by TLS.
#[derive(Clone)]
pub struct EtcdTls {
    /// The authority whose certificates its members must have, PEM.
    pub authority: Vec<u8>,
    /// Own certificate and its private key, PEM, where etcd asks for one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl std::fmt::Debug for EtcdTls {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("EtcdTls").finish_non_exhaustive()
    }
}

/// See the module.
#[derive(Clone)]
pub struct EtcdConfig {
    /// Its members: `http://HOST:PORT`, `https://HOST:PORT`, or `HOST:PORT`, which is https where there are keys.
    pub members: Vec<String>,
    /// Keys.
    pub tls: Option<EtcdTls>,
    /// User and password.
    pub user: Option<(String, String)>,
}

impl std::fmt::Debug for EtcdConfig {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("EtcdConfig").field("members", &self.members).finish_non_exhaustive()
    }
}

/// etcd can't be used.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// An address.
    #[error("\"{}\" is no address of an etcd member: write http://HOST:PORT or https://HOST:PORT, several with commas between them", .0.escape_debug())]
    Address(String),
    /// Keys that an address makes no use of, or lacks.
    #[error(
        "The address {0} of an etcd member and the keys don't go together: https needs --etcd-ca, and http takes no keys"
    )]
    Keys(String),
    /// A file.
    #[error("The file {} for etcd can't be read", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Threads.
    #[error("The client of etcd could not be set up")]
    SetUp(#[source] std::io::Error),
    /// This program has no client of it.
    #[error(
        "This program was built without etcd; build it with `cargo build --release -p causeway --features etcd`, which needs the packages protobuf-compiler and libprotobuf-dev"
    )]
    NotBuilt,
}

impl EtcdConfig {
    /// Takes a list of members with commas between them.
    ///
    /// # Errors
    /// When one is no address.
    pub fn new(members: &str) -> Result<Self, EtcdError> {
        let members = members.split(',').map(str::to_owned).collect();
        let config = Self { members, tls: None, user: None };
        for member in &config.members {
            let (_, place) = member.split_once("://").unwrap_or(("", member));
            let port = place.rsplit_once(':').and_then(|(host, port)| {
                let fine =
                    !host.is_empty() && host.chars().all(|letter| letter.is_ascii_graphic() && letter != '/');
                port.parse::<u16>().ok().filter(|port| fine && *port > 0)
            });
            let scheme = ["http://", "https://"].iter().any(|scheme| member.starts_with(scheme));
            if port.is_none() || (member.contains("://") && !scheme) {
                return Err(EtcdError::Address(member.chars().take(300).collect()));
            }
        }
        Ok(config)
    }

    /// Whether addresses and keys go together.
    ///
    /// # Errors
    /// When they don't.
    pub fn check(&self) -> Result<(), EtcdError> {
        let wrong = if self.tls.is_some() { "http://" } else { "https://" };
        match self.members.iter().find(|member| member.starts_with(wrong)) {
            Some(member) => Err(EtcdError::Keys(member.clone())),
            None => Ok(()),
        }
    }

    /// Reads a file for it.
    ///
    /// # Errors
    /// When that can't be read.
    pub fn read(path: &Path) -> Result<Vec<u8>, EtcdError> {
        std::fs::read(path).map_err(|source| EtcdError::File { path: path.to_owned(), source })
    }

    /// Its client. Nothing is connected yet.
    ///
    /// # Errors
    /// When addresses or keys are wrong; when this program was built without etcd.
    #[cfg(feature = "etcd")]
    pub fn client(self) -> Result<Arc<dyn Kv>, EtcdError> {
        Ok(Arc::new(crate::etcd::Etcd::new(self)?))
    }

    /// Its client, which this program was built without.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(feature = "etcd"))]
    pub fn client(self) -> Result<Arc<dyn Kv>, EtcdError> {
        self.check()?;
        Err(EtcdError::NotBuilt)
    }
}

#[cfg(test)]
mod tests {
    use super::{EtcdConfig, EtcdError, EtcdTls};

    /// Said by programs that are built without the feature; CI builds with it.
    #[test]
    fn a_program_without_etcd_says_how_to_build_one_with_it() {
        let said = EtcdError::NotBuilt.to_string();
        assert!(said.contains("built without etcd") && said.contains("--features etcd"), "{said}");
    }

    #[test]
    fn addresses_are_checked() {
        let several = EtcdConfig::new("https://a:2379,10.0.0.1:2379,http://[::1]:1").unwrap();
        assert_eq!(several.members.len(), 3);
        for wrong in [
            "",
            "a",
            "ftp://a:1",
            "http://a",
            "http://a:1,",
            "http://a:0",
            "http://:1",
            "a:1/x",
            "http://a/b:1",
        ] {
            let error = EtcdConfig::new(wrong).unwrap_err().to_string();
            assert!(error.contains("is no address of an etcd member"), "{wrong}: {error}");
        }
        let mut config = EtcdConfig::new("https://a:1").unwrap();
        assert!(config.check().unwrap_err().to_string().contains("https needs --etcd-ca"));
        config.tls = Some(EtcdTls { authority: Vec::new(), identity: None });
        config.check().unwrap();
    }

    #[cfg(not(feature = "etcd"))]
    #[test]
    fn a_program_without_etcd_says_how_to_build_one_with() {
        let error = EtcdConfig::new("http://a:1").unwrap().client().map(drop).unwrap_err().to_string();
        assert!(error.contains("--features etcd"), "{error}");
    }
}
