//! A blocking client of one VM's API.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::types::{Done, ExitTable, NicBehind, Problem, VmSummary};

/// Limit of a VM's response in bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// A request to a VM failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens at the socket.
    #[error("No VM answers at {}", socket.display())]
    Connect {
        /// The socket's path.
        socket: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The VM didn't respond in time.
    #[error(
        "The VM at {} gave no answer to {request} within {} s; its monitor may be stuck",
        socket.display(), timeout.as_secs()
    )]
    Timeout {
        /// The socket's path.
        socket: PathBuf,
        /// The request.
        request: String,
        /// The time-out.
        timeout: Duration,
    },
    /// The connection broke, or the peer doesn't speak HTTP.
    #[error("The VM at {} broke off its answer to {request}", socket.display())]
    Broken {
        /// The socket's path.
        socket: PathBuf,
        /// The request.
        request: String,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The response doesn't match the API.
    #[error("The VM at {} answered {request} with something that this version doesn't understand", socket.display())]
    NotUnderstood {
        /// The socket's path.
        socket: PathBuf,
        /// The request.
        request: String,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// The VM refused the request.
    #[error("{problem}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The VM's message.
        problem: Problem,
    },
    /// This process can't create connections.
    #[error("The client could not be set up")]
    SetUp {
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// A client of one VM. Each call opens its own connection and blocks the calling thread.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    timeout: Duration,
}

impl Client {
    /// Creates a client of the VM at `socket`, without a connection. The time-out of a response is 30 seconds.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), timeout: Duration::from_secs(30) }
    }

    /// Sets the time-out of a response.
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Returns the socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the VM's summary.
    pub fn summary(&self) -> Result<VmSummary, ClientError> {
        self.json(Method::GET, "/v1/vm")
    }

    /// Returns the live device tree, or the part below `path` (`disks/disk0`).
    pub fn inspect(&self, path: Option<&str>) -> Result<serde_json::Value, ClientError> {
        match path {
            None => self.json(Method::GET, "/v1/inspect"),
            Some(path) => self.json(Method::GET, &format!("/v1/inspect?path={}", percent_encode(path))),
        }
    }

    /// Pauses vCPUs and devices.
    pub fn pause(&self) -> Result<Done, ClientError> {
        self.json(Method::PUT, "/v1/pause")
    }

    /// Resumes a paused VM. A VM in doubt, which may run on another host, requires `force`.
    pub fn resume(&self, force: bool) -> Result<Done, ClientError> {
        self.json(Method::PUT, if force { "/v1/resume?force=true" } else { "/v1/resume" })
    }

    /// Changes the backend of a commodity NIC.
    pub fn change_nic(&self, nic: &str, behind: NicBehind) -> Result<Done, ClientError> {
        self.json(
            Method::PUT,
            &format!("/v1/nics/{}?behind={behind}", percent_encode(nic).replace('/', "%2F")),
        )
    }

    /// Cancels the current migration. The guest continues here unless the migration can't be aborted any more.
    pub fn cancel_migration(&self) -> Result<Done, ClientError> {
        self.json(Method::DELETE, "/v1/migration")
    }

    /// Presses the power button.
    pub fn power_button(&self) -> Result<Done, ClientError> {
        self.json(Method::PUT, "/v1/power-button")
    }

    /// Presses the reset button. A VM in doubt requires `force`.
    pub fn reset(&self, force: bool) -> Result<Done, ClientError> {
        self.json(Method::PUT, if force { "/v1/reset?force=true" } else { "/v1/reset" })
    }

    /// Stops the VM immediately.
    pub fn stop(&self) -> Result<Done, ClientError> {
        self.json(Method::DELETE, "/v1/vm")
    }

    /// Returns the exit counters.
    pub fn exits(&self) -> Result<ExitTable, ClientError> {
        self.json(Method::GET, "/v1/exits")
    }

    /// Returns the metrics as Prometheus text.
    pub fn metrics(&self) -> Result<String, ClientError> {
        let bytes = self.request(Method::GET, "/metrics")?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the OpenAPI description.
    pub fn openapi(&self) -> Result<serde_json::Value, ClientError> {
        self.json(Method::GET, "/openapi.json")
    }

    fn json<T: DeserializeOwned>(&self, method: Method, path: &str) -> Result<T, ClientError> {
        let request = format!("{method} {path}");
        let bytes = self.request(method, path)?;
        serde_json::from_slice(&bytes).map_err(|source| ClientError::NotUnderstood {
            socket: self.socket.clone(),
            request,
            source,
        })
    }

    fn request(&self, method: Method, path: &str) -> Result<Bytes, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|source| ClientError::SetUp { source })?;
        let request = format!("{method} {path}");
        runtime.block_on(async {
            match tokio::time::timeout(self.timeout, self.exchange(method, path, &request)).await {
                Ok(answer) => answer,
                Err(_) => {
                    Err(ClientError::Timeout { socket: self.socket.clone(), request, timeout: self.timeout })
                }
            }
        })
    }

    async fn exchange(&self, method: Method, path: &str, what: &str) -> Result<Bytes, ClientError> {
        let connect = |source| ClientError::Connect { socket: self.socket.clone(), source };
        let broken = |source: Box<dyn std::error::Error + Send + Sync>| ClientError::Broken {
            socket: self.socket.clone(),
            request: what.to_owned(),
            source,
        };
        let stream = loop {
            match UnixStream::connect(&self.socket).await {
                // The listener's queue is full. The caller's time-out limits the retries.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                connected => break connected.map_err(connect)?,
            }
        };
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| broken(error.into()))?;
        // The runtime ends with this call, and so does the task.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(hyper::header::HOST, "localhost")
            .body(Empty::<Bytes>::new())
            .map_err(|error| broken(error.into()))?;
        let answer = sender.send_request(request).await.map_err(|error| broken(error.into()))?;
        let status = answer.status();
        let body =
            Limited::new(answer.into_body(), MAX_RESPONSE_BYTES).collect().await.map_err(broken)?.to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        Err(ClientError::Refused { status: status.as_u16(), problem: problem(status, &body) })
    }
}

/// Returns the message of a refusal. Quotes a response that isn't from a VM.
fn problem(status: StatusCode, body: &[u8]) -> Problem {
    serde_json::from_slice(body).unwrap_or_else(|_| {
        let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
        Problem {
            error: format!("The VM answered {status}: \"{}\"", text.escape_debug()),
            causes: Vec::new(),
        }
    })
}

/// RFC 3986, section 2.1: everything but unreserved characters and `/`.
fn percent_encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;
    use std::path::Path;
    use std::time::Duration;

    use super::{Client, ClientError, percent_encode};

    /// Starts a server that reads one request and sends these bytes.
    fn server(socket: &Path, answer: &'static [u8]) -> std::thread::JoinHandle<String> {
        let listener = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut buffer = [0; 1024];
            while !request.windows(4).any(|end| end == b"\r\n\r\n") {
                let read = stream.read(&mut buffer).unwrap();
                request.extend_from_slice(&buffer[..read]);
            }
            stream.write_all(answer).unwrap();
            String::from_utf8(request).unwrap()
        })
    }

    fn exchange(answer: &'static [u8]) -> (String, Result<serde_json::Value, ClientError>) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("vm.sock");
        let server = server(&socket, answer);
        let result = Client::new(&socket).inspect(Some("disks/a b&c"));
        (server.join().unwrap(), result)
    }

    #[test]
    fn an_answer_is_parsed_and_the_path_encoded() {
        let (request, result) = exchange(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{\"a\":1}");
        assert!(request.starts_with("GET /v1/inspect?path=disks/a%20b%26c HTTP/1.1\r\n"), "{request}");
        assert_eq!(result.unwrap(), serde_json::json!({"a": 1}));
    }

    #[test]
    fn a_refusal_has_the_vms_reason() {
        let (_, result) = exchange(
            b"HTTP/1.1 409 Conflict\r\ncontent-length: 33\r\n\r\n{\"error\":\"No\",\"causes\":[\"b\",\"c\"]}",
        );
        let error = result.unwrap_err();
        assert!(matches!(error, ClientError::Refused { status: 409, .. }));
        assert_eq!(error.to_string(), "No; b; c");
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        for answer in [
            &b""[..],
            b"hello\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"a\":",
            b"\0\xff\0\xff\r\n\r\n",
        ] {
            assert!(matches!(exchange(answer).1, Err(ClientError::Broken { .. })), "{answer:?}");
        }
        let (_, result) = exchange(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello");
        assert!(matches!(result, Err(ClientError::NotUnderstood { .. })));
        let (_, result) = exchange(b"HTTP/1.1 500 No\r\ncontent-length: 5\r\n\r\nhello");
        assert!(result.unwrap_err().to_string().contains("\"hello\""));
    }

    #[test]
    fn nobody_there_and_nobody_answering_are_told_apart() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("vm.sock");
        assert!(matches!(Client::new(&socket).summary(), Err(ClientError::Connect { .. })));
        let _silent = UnixListener::bind(&socket).unwrap();
        let client = Client::new(&socket).with_timeout(Duration::from_millis(50));
        assert!(matches!(client.summary(), Err(ClientError::Timeout { .. })));
    }

    #[test]
    fn only_unreserved_characters_travel_as_they_are() {
        assert_eq!(percent_encode("a/b-1_~.?é"), "a/b-1_~.%3F%C3%A9");
    }
}
