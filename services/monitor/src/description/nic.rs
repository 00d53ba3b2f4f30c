//! Validation of commodity NICs: `[[nic]]`.

use super::validate::{MAX_DEVICES_OF_ONE_KIND, at_most, interface, path, quoted};
use super::vm::{Nic, NicMode, NicPolicy};
use super::{Invalid, Key, MacAddress, written};

/// First device number of commodity NICs, for derived addresses. virtio-net devices start at 0, RDMA NICs at 1000.
const FIRST_NUMBER: usize = 2000;

/// Checks the list. A card, a tap and an address may be used once.
pub(super) fn validate(vm: &written::Vm, vm_name: &str) -> Result<Vec<Nic>, Invalid> {
    let mut nics: Vec<Nic> = Vec::new();
    for (index, written) in vm.nic.iter().flatten().enumerate() {
        let mode = mode(vm_name, index, written)?;
        for other in &nics {
            if let Some((field, value)) = shared(&mode, &other.mode) {
                let problem = format!("{value} is taken by {} already", other.name);
                return Err(Invalid::new(Key::root("nic").item(index).below(field), problem));
            }
        }
        nics.push(Nic { name: format!("nic{index}"), mode });
    }
    at_most("nic", nics.len(), MAX_DEVICES_OF_ONE_KIND)?;
    Ok(nics)
}

/// A resource that two NICs share, which isn't allowed: its key and its value.
fn shared(one: &NicMode, other: &NicMode) -> Option<(&'static str, String)> {
    let card = |mode: &NicMode| match mode {
        NicMode::Vpio { device, .. } => Some(("vpio", device.clone())),
        NicMode::Passthrough { device } => Some(("passthrough", device.clone())),
        NicMode::Virtual { .. } => None,
    };
    let tap = |mode: &NicMode| match mode {
        NicMode::Virtual { tap, .. } => Some(tap.clone()),
        NicMode::Vpio { tap, .. } => tap.clone(),
        NicMode::Passthrough { .. } => None,
    };
    if let Some(tap) = tap(one).filter(|own| tap(other).as_ref() == Some(own)) {
        return Some(("tap", tap));
    }
    if let (NicMode::Virtual { mac, .. }, NicMode::Virtual { mac: its_mac, .. }) = (one, other) {
        return (mac == its_mac).then(|| ("mac", mac.to_string()));
    }
    let ((key, device), (_, its)) = (card(one)?, card(other)?);
    (device == its).then_some((key, device))
}

fn mode(vm: &str, index: usize, nic: &written::Nic) -> Result<NicMode, Invalid> {
    let key = Key::root("nic").item(index);
    let foreign = |fields: &[(&str, bool)], whose: &str| {
        let found = fields.iter().find(|(_, present)| *present);
        found.map_or(Ok(()), |(field, _)| {
            Err(Invalid::new(key.below(field), format!("it belongs to {whose}; leave it out")))
        })
    };
    let tap_fields = [("tap", nic.tap.is_some()), ("mac", nic.mac.is_some())];
    let model_fields = [
        ("policy", nic.policy.is_some()),
        ("allow", nic.allow.is_some()),
        ("violations", nic.violations.is_some()),
    ];
    match (&nic.vpio, &nic.passthrough, &nic.emulate) {
        (Some(device), None, None) => {
            foreign(&tap_fields[1..], "virtual")?;
            let tap = nic.tap.as_deref().map(|tap| interface(&key.below("tap"), tap)).transpose()?;
            if let Some(file) = &nic.violations {
                path(&key.below("violations"), file)?;
            }
            Ok(NicMode::Vpio {
                device: pci_address(&key.below("vpio"), device)?,
                policy: nic.policy.unwrap_or(NicPolicy::DeviceError),
                allow: nic.allow.clone().unwrap_or_default(),
                tap,
                violations: nic.violations.clone(),
            })
        }
        (None, Some(device), None) => {
            foreign(&tap_fields, "virtual")?;
            foreign(&model_fields, "vpio")?;
            Ok(NicMode::Passthrough { device: pci_address(&key.below("passthrough"), device)? })
        }
        (None, None, Some(model)) => {
            foreign(&model_fields, "vpio")?;
            if device_models::devices::named(model).is_none() {
                let known: Vec<_> = device_models::devices::ALL.iter().map(|device| device.name).collect();
                let problem = format!("{} is not a card; there are {}", quoted(model), known.join(", "));
                return Err(Invalid::new(key.below("virtual"), problem));
            }
            let Some(tap) = &nic.tap else {
                return Err(Invalid::new(key.below("tap"), "an emulated card needs a tap; name one"));
            };
            let mac = nic.mac.unwrap_or_else(|| MacAddress::derived(vm, FIRST_NUMBER + index));
            if !mac.is_unicast() {
                let problem = format!(
                    "{mac} is a group address or zero; a device's own address has an even first byte"
                );
                return Err(Invalid::new(key.below("mac"), problem));
            }
            Ok(NicMode::Virtual { model: model.clone(), tap: interface(&key.below("tap"), tap)?, mac })
        }
        _ => {
            let problem =
                "write exactly one of vpio = \"ADDRESS\", passthrough = \"ADDRESS\" and virtual = \"CARD\"";
            Err(Invalid::new(key, problem))
        }
    }
}

/// Checks a PCI address, and converts it to lower case as in sysfs: `0000:03:00.0`.
fn pci_address(key: &Key, text: &str) -> Result<String, Invalid> {
    let shape = [4, 2, 2, 1];
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let hex = |part: &&str, digits: usize| {
        part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let separated = text.bytes().map(|byte| match byte {
        b':' | b'.' => byte,
        _ => b'x',
    });
    let fits = parts.len() == shape.len()
        && parts.iter().zip(shape).all(|(part, digits)| hex(part, digits))
        && separated.eq(*b"xxxx:xx:xx.x");
    if !fits {
        let problem =
            format!("{} is not a PCI address; write it as lspci -D does: 0000:03:00.0", quoted(text));
        return Err(Invalid::new(key.clone(), problem));
    }
    Ok(text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::super::{NicMode, NicPolicy};

    fn nics(text: &str) -> Result<Vec<super::Nic>, String> {
        let text = format!("kernel = \"k\"\n{text}");
        let (written, _) =
            super::super::parse(&text, "/x/a.toml".as_ref()).map_err(|error| error.to_string())?;
        super::super::validate(&written).map(|vm| vm.nics).map_err(|invalid| invalid.problem)
    }

    #[test]
    fn the_three_modes_are_understood() {
        let got = nics(
            "[[nic]]\nvpio = \"0000:03:0A.0\"\nallow = [\"promiscuous\"]\n[[nic]]\npassthrough = \"0000:04:00.0\"\n\
             [[nic]]\nvirtual = \"rtl8139\"\ntap = \"tap0\"\n",
        )
        .unwrap();
        let NicMode::Vpio { device, policy, allow, tap, violations } = &got[0].mode else {
            panic!("{got:?}")
        };
        assert_eq!((device.as_str(), *policy, allow.len()), ("0000:03:0a.0", NicPolicy::DeviceError, 1));
        assert_eq!((tap, violations), (&None, &None));
        assert_eq!(got[1].mode, NicMode::Passthrough { device: "0000:04:00.0".to_owned() });
        let NicMode::Virtual { model, tap, mac } = &got[2].mode else { panic!("{got:?}") };
        assert_eq!((model.as_str(), tap.as_str(), mac.is_unicast()), ("rtl8139", "tap0", true));
        assert_eq!(got[2].name, "nic2");
    }

    #[test]
    fn what_can_not_be_is_named() {
        for (text, expected) in [
            ("[[nic]]", "exactly one of"),
            ("[[nic]]\nvpio = \"0000:03:00.0\"\npassthrough = \"0000:03:00.0\"", "exactly one of"),
            ("[[nic]]\nvpio = \"03:00.0\"", "not a PCI address"),
            ("[[nic]]\nvpio = \"0000.03.00.0\"", "not a PCI address"),
            ("[[nic]]\nvpio = \"../../../x:y.0\"", "not a PCI address"),
            ("[[nic]]\nvirtual = \"3c905\"\ntap = \"t\"", "there are ne2000, rtl8139, e1000"),
            ("[[nic]]\nvirtual = \"ne2000\"", "needs a tap"),
            ("[[nic]]\nvpio = \"0000:03:00.0\"\nmac = \"02:00:00:00:00:01\"", "belongs to virtual"),
            ("[[nic]]\npassthrough = \"0000:03:00.0\"\ntap = \"t\"", "belongs to virtual"),
            (
                "[[nic]]\nvpio = \"0000:03:00.0\"\ntap = \"t\"\n[[nic]]\nvirtual = \"ne2000\"\ntap = \"t\"",
                "taken by nic0",
            ),
            ("[[nic]]\npassthrough = \"0000:03:00.0\"\npolicy = \"stop\"", "belongs to vpio"),
            ("[[nic]]\nvpio = \"0000:03:00.0\"\nviolations = \"\"", "the path is empty"),
            ("[[nic]]\nvirtual = \"ne2000\"\ntap = \"t\"\nviolations = \"f\"", "belongs to vpio"),
            ("[[nic]]\nvpio = \"0000:03:00.0\"\n[[nic]]\npassthrough = \"0000:03:00.0\"", "taken by nic0"),
        ] {
            let error = nics(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error:?} has no {expected:?}");
        }
    }
}
