//! Mutual TLS: both sides present certificates of one authority. The service refuses clients without one.

use crate::common;

use common::{Says as _, start_with};
use control_api::cluster::{ClusterError, Keys, Service};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority() -> Authority {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Keys of a client or service at `name`, certified by `issuer`, that trusts `believed`.
fn keys(issuer: &Authority, believed: &Authority, name: &str) -> Keys {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let certificate = params.signed_by(&key, issuer).unwrap();
    Keys {
        authority: believed.pem().into_bytes(),
        certificate: certificate.pem().into_bytes(),
        key: key.serialize_pem().into_bytes(),
    }
}

#[test]
fn only_those_with_a_certificate_of_the_authority_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, other) = (authority(), authority());
    let (server, plain) = start_with(folder.path(), |config| {
        config.keys = Some(keys(&ours, &ours, "127.0.0.1"));
    });
    let address = server.address().to_string();
    let with = |keys| Service::new(&address, Some(keys)).unwrap();
    let known = with(keys(&ours, &ours, "h1"));
    known.host("h1", 1, 0).unwrap();
    assert!(known.state().unwrap().authenticated);
    // Clients without a certificate, with a certificate of another authority, and with another trust anchor than the
    // service's.
    let strangers = [
        plain,
        with(keys(&other, &ours, "h2")),
        with(keys(&other, &other, "h3")),
        with(keys(&ours, &other, "h4")),
    ];
    for stranger in &strangers {
        let error = stranger.host("x", 9, 0).unwrap_err();
        let (connect, broken) =
            (matches!(error, ClusterError::Connect { .. }), matches!(error, ClusterError::Broken { .. }));
        assert!(connect || broken, "{error:?}");
    }
    assert_eq!(known.state().unwrap().hosts.len(), 1, "a stranger changed something");
}

/// A client receives an error when the service's certificate is for another name than the client connected to.
#[test]
fn a_service_that_is_somebody_else_is_not_spoken_with() {
    let folder = tempfile::tempdir().unwrap();
    let ours = authority();
    let (server, _) = start_with(folder.path(), |config| {
        config.keys = Some(keys(&ours, &ours, "10.9.9.9"));
    });
    let service = Service::new(&server.address().to_string(), Some(keys(&ours, &ours, "h1"))).unwrap();
    let error = service.state().unwrap_err();
    assert!(matches!(error, ClusterError::Connect { .. }), "{error:?}");
}

#[test]
fn files_of_keys_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let ours = authority();
    let fine = keys(&ours, &ours, "h1");
    std::fs::write(path("ca"), &fine.authority).unwrap();
    std::fs::write(path("cert"), &fine.certificate).unwrap();
    std::fs::write(path("key"), &fine.key).unwrap();
    Keys::load(&path("ca"), &path("cert"), &path("key")).unwrap();
    let said = |ca: &str, cert: &str, key: &str| {
        Keys::load(&path(ca), &path(cert), &path(key)).map(drop).unwrap_err().to_string()
    };
    assert!(said("none", "cert", "key").contains("none can't be read"));
    assert!(said("ca", "key", "cert").contains("key holds no certificate in PEM format"));
    assert!(said("ca", "cert", "cert").contains("cert holds no private key in PEM format"));
    // A private key that doesn't match the certificate.
    let mixed = Keys { key: keys(&ours, &ours, "h2").key, ..fine };
    let mut config = cluster::ServerConfig::new("127.0.0.1:0".parse().unwrap(), path("db"));
    config.keys = Some(mixed);
    let error = cluster::Server::start(&config).map(drop).unwrap_err().to_string();
    assert!(error.contains("can't be used"), "{error}");
}
