//! Metrics in Prometheus' text format 0.0.4, collected on request: there is no global registry. The owner of a counter
//! puts it into a [`Family`] under the name that Linux exporters use.

use prometheus::proto::{self, MetricType};
use prometheus::{Encoder as _, TextEncoder};

/// `Content-Type` of [`encode`]'s result.
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// Metrics of one name, distinguished by labels.
#[derive(Debug, Clone)]
pub struct Family {
    name: String,
    help: String,
    kind: MetricType,
    samples: Vec<Sample>,
}

#[derive(Debug, Clone)]
struct Sample {
    labels: Vec<(String, String)>,
    value: f64,
}

impl Family {
    /// Creates a family of values that only grow. By convention the name ends in `_total`.
    pub fn counter(name: &str, help: &str) -> Self {
        Self::new(name, help, MetricType::COUNTER)
    }

    /// Creates a family of values that may rise and fall.
    pub fn gauge(name: &str, help: &str) -> Self {
        Self::new(name, help, MetricType::GAUGE)
    }

    fn new(name: &str, help: &str, kind: MetricType) -> Self {
        debug_assert!(is_name(name), "{name} is not a metric name");
        Self { name: name.to_owned(), help: help.to_owned(), kind, samples: Vec::new() }
    }

    /// Adds a value with its labels (name, value).
    pub fn add(&mut self, labels: &[(&str, &str)], value: f64) {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        self.samples.push(Sample { labels, value });
    }

    /// Adds an integer. Above 2^53 it is rounded, as Prometheus itself does.
    #[allow(clippy::cast_precision_loss)]
    pub fn add_count(&mut self, labels: &[(&str, &str)], value: u64) {
        self.add(labels, value as f64);
    }

    /// Returns the family's name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Writes families as text, ordered by name. Every sample also gets the `common` labels (for instance `vm`). Families
/// of the same name are merged, and empty ones omitted.
///
/// # Errors
///
/// The encoder refuses a family.
pub fn encode(families: &[Family], common: &[(&str, &str)]) -> Result<String, EncodeError> {
    let mut ordered: Vec<&Family> = families.iter().filter(|family| !family.samples.is_empty()).collect();
    ordered.sort_by(|a, b| a.name.cmp(&b.name));
    let mut joined: Vec<proto::MetricFamily> = Vec::with_capacity(ordered.len());
    for family in ordered {
        let metrics = family.samples.iter().map(|sample| metric(family.kind, sample, common));
        match joined.last_mut().filter(|last| last.name() == family.name) {
            Some(last) => last.mut_metric().extend(metrics),
            None => {
                let mut new = proto::MetricFamily::default();
                new.set_name(family.name.clone());
                new.set_help(family.help.clone());
                new.set_field_type(family.kind);
                new.set_metric(metrics.collect());
                joined.push(new);
            }
        }
    }
    let mut text = Vec::new();
    TextEncoder::new().encode(&joined, &mut text).map_err(|error| EncodeError(error.to_string()))?;
    String::from_utf8(text).map_err(|error| EncodeError(error.to_string()))
}

/// Metrics can't be encoded.
#[derive(Debug)]
pub struct EncodeError(String);

impl std::fmt::Display for EncodeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "The metrics can't be written as text: {}", self.0)
    }
}

impl std::error::Error for EncodeError {}

fn metric(kind: MetricType, sample: &Sample, common: &[(&str, &str)]) -> proto::Metric {
    let own = sample.labels.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    let label = |(name, value): (&str, &str)| {
        let mut pair = proto::LabelPair::default();
        pair.set_name(name.to_owned());
        pair.set_value(value.to_owned());
        pair
    };
    let mut metric = proto::Metric::from_label(common.iter().copied().chain(own).map(label).collect());
    if kind == MetricType::GAUGE {
        let mut gauge = proto::Gauge::default();
        gauge.set_value(sample.value);
        metric.set_gauge(gauge);
    } else {
        let mut counter = proto::Counter::default();
        counter.set_value(sample.value);
        metric.set_counter(counter);
    }
    metric
}

#[cfg(test)]
mod tests {
    use super::{Family, encode};

    #[test]
    fn families_of_one_name_are_joined_and_every_sample_has_the_common_labels() {
        let mut reads = Family::counter("node_disk_read_bytes_total", "Bytes read.");
        reads.add_count(&[("device", "disk0")], 4096);
        let mut more = Family::counter("node_disk_read_bytes_total", "Bytes read.");
        more.add_count(&[("device", "disk1")], 7);
        let mut size = Family::gauge("kvm_memory_bytes", "Guest RAM.");
        size.add(&[], 0.5);
        let empty = Family::gauge("nothing", "Nothing.");
        let text = encode(&[reads, size, more, empty], &[("vm", "a\"b\n")]).unwrap();
        assert_eq!(
            text,
            "# HELP kvm_memory_bytes Guest RAM.\n\
             # TYPE kvm_memory_bytes gauge\n\
             kvm_memory_bytes{vm=\"a\\\"b\\n\"} 0.5\n\
             # HELP node_disk_read_bytes_total Bytes read.\n\
             # TYPE node_disk_read_bytes_total counter\n\
             node_disk_read_bytes_total{vm=\"a\\\"b\\n\",device=\"disk0\"} 4096\n\
             node_disk_read_bytes_total{vm=\"a\\\"b\\n\",device=\"disk1\"} 7\n"
        );
    }
}
