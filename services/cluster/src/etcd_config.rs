//! The addresses and credentials of an etcd cluster.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::kv::Kv;

/// TLS certificates and key of a client of etcd.
#[derive(Clone)]
pub struct EtcdTls {
    /// The CA certificate that has signed the members' certificates, PEM.
    pub authority: Vec<u8>,
    /// The client's certificate and private key, PEM, if etcd verifies clients.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl std::fmt::Debug for EtcdTls {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("EtcdTls").finish_non_exhaustive()
    }
}

/// Addresses and credentials of an etcd cluster.
#[derive(Clone)]
pub struct EtcdConfig {
    /// Addresses of members: `http://HOST:PORT`, `https://HOST:PORT`, or `HOST:PORT`, which means https if `tls` is
    /// set.
    pub members: Vec<String>,
    /// Certificates for https; `None` for http.
    pub tls: Option<EtcdTls>,
    /// User and password, if etcd's authentication is on.
    pub user: Option<(String, String)>,
}

impl std::fmt::Debug for EtcdConfig {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("EtcdConfig").field("members", &self.members).finish_non_exhaustive()
    }
}

/// Why etcd can't be used.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// The address of a member is invalid.
    #[error("\"{}\" is no address of an etcd member: write http://HOST:PORT or https://HOST:PORT, several with commas between them", .0.escape_debug())]
    Address(String),
    /// An http address with certificates, or an https address without.
    #[error(
        "The address {0} of an etcd member and the keys don't go together: https needs --etcd-ca, and http takes no keys"
    )]
    Keys(String),
    /// A certificate or key file can't be read.
    #[error("The file {} for etcd can't be read", path.display())]
    File {
        /// The file's path.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// The threads of the client's runtime couldn't be started.
    #[error("The client of etcd could not be set up")]
    SetUp(#[source] std::io::Error),
    /// This program was built without the feature `etcd`.
    #[error(
        "This program was built without etcd; build it with `cargo build --release -p causeway --features etcd`, which needs the packages protobuf-compiler and libprotobuf-dev"
    )]
    NotBuilt,
}

impl EtcdConfig {
    /// Parses a comma-separated list of members.
    ///
    /// # Errors
    /// When an address is invalid.
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

    /// Checks that all addresses are https if certificates are set, and http otherwise.
    ///
    /// # Errors
    /// When an address doesn't match.
    pub fn check(&self) -> Result<(), EtcdError> {
        let wrong = if self.tls.is_some() { "http://" } else { "https://" };
        match self.members.iter().find(|member| member.starts_with(wrong)) {
            Some(member) => Err(EtcdError::Keys(member.clone())),
            None => Ok(()),
        }
    }

    /// Reads a certificate or key file.
    ///
    /// # Errors
    /// When the file can't be read.
    pub fn read(path: &Path) -> Result<Vec<u8>, EtcdError> {
        std::fs::read(path).map_err(|source| EtcdError::File { path: path.to_owned(), source })
    }

    /// Creates a client. It connects at its first request.
    ///
    /// # Errors
    /// When addresses or certificates are invalid.
    #[cfg(feature = "etcd")]
    pub fn client(self) -> Result<Arc<dyn Kv>, EtcdError> {
        Ok(Arc::new(crate::etcd::Etcd::new(self)?))
    }

    /// Fails: this program was built without a client of etcd.
    ///
    /// # Errors
    /// Always [`EtcdError::NotBuilt`], or the error of [`EtcdConfig::check`].
    #[cfg(not(feature = "etcd"))]
    pub fn client(self) -> Result<Arc<dyn Kv>, EtcdError> {
        self.check()?;
        Err(EtcdError::NotBuilt)
    }
}

#[cfg(test)]
mod tests {
    use super::{EtcdConfig, EtcdError, EtcdTls};

    /// The message of programs that are built without the feature; CI builds with it.
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
