//! Selects a part of the device tree by its path.

use serde_json::Value;

/// The value at `path` (`disks/disk0/queues/1`), which consists of keys of objects and indexes of lists. Empty parts are skipped, so
/// `/disks/` equals `disks`.
///
/// # Errors
///
/// A sentence that says up to where the path is valid, and what is there.
pub(super) fn select(tree: Value, path: &str) -> Result<Value, String> {
    let mut value = tree;
    let mut passed = String::new();
    for part in path.split('/').filter(|part| !part.is_empty()) {
        let next = match &mut value {
            Value::Object(map) => map.get_mut(part).map(Value::take),
            Value::Array(items) => {
                part.parse::<usize>().ok().and_then(|index| items.get_mut(index)).map(Value::take)
            }
            _ => None,
        };
        let Some(next) = next else {
            let place = if passed.is_empty() { "The device tree" } else { passed.as_str() };
            return Err(format!("{place} has no \"{}\"; {}", part.escape_debug(), contents(&value)));
        };
        if !passed.is_empty() {
            passed.push('/');
        }
        passed.push_str(part);
        value = next;
    }
    Ok(value)
}

fn contents(value: &Value) -> String {
    match value {
        Value::Object(map) if map.is_empty() => "it is empty".to_owned(),
        Value::Object(map) => {
            format!("it has {}", map.keys().map(String::as_str).collect::<Vec<_>>().join(", "))
        }
        Value::Array(items) if items.is_empty() => "it is an empty list".to_owned(),
        Value::Array(items) => format!("it is a list of 0 to {}", items.len() - 1),
        _ => "it is a single value".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::select;

    #[test]
    fn a_path_leads_through_objects_and_lists() {
        let tree = json!({"disks": {"disk0": {"queues": [{"reads": 1}, {"reads": 2}]}}, "empty": []});
        assert_eq!(select(tree.clone(), "").unwrap(), tree);
        assert_eq!(select(tree.clone(), "/disks/disk0/queues/1/reads").unwrap(), json!(2));
        let wrong = |path| select(tree.clone(), path).unwrap_err();
        assert_eq!(wrong("net"), "The device tree has no \"net\"; it has disks, empty");
        assert_eq!(wrong("disks/disk0/queues/2"), "disks/disk0/queues has no \"2\"; it is a list of 0 to 1");
        assert_eq!(wrong("empty/0"), "empty has no \"0\"; it is an empty list");
        assert_eq!(
            wrong("disks/disk0/queues/0/reads/x"),
            "disks/disk0/queues/0/reads has no \"x\"; it is a single value"
        );
    }
}
