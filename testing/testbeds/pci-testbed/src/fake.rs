//! A function with memory behind its BARs, for tests of the bus. Also the shortest complete example of a function.

use std::sync::{Arc, Mutex};

use crate::lock;
use pci::config::{
    CapabilityBuilder, ClassCode, ConfigSpace, ExpressKind, Identity, InterruptPin, SavedConfig,
};
use pci::function::{
    BarKind, BarLayout, BarMapping, BarPlace, ConfigEffect, Doorbell, FunctionError, PciFunction,
    SavedFunction,
};
use pci::interrupt::{IntxLine, Msi};
use pci::intx::IntxPin;
use pci::msix::{Msix, MsixLayout, SavedMsix};

/// Size in bytes of the memory behind each BAR. Larger BARs read as zero beyond it.
const MEMORY: usize = 256;

/// Parameters of a [`FakeFunction`].
pub struct FakeFunctionBuilder {
    name: String,
    bars: Vec<BarLayout>,
    pin: Option<InterruptPin>,
    msix: Option<(MsixLayout, Arc<dyn Msi>)>,
}

impl std::fmt::Debug for FakeFunctionBuilder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "FakeFunctionBuilder({})", self.name)
    }
}

impl FakeFunctionBuilder {
    /// Adds a BAR that isn't prefetchable.
    #[must_use]
    pub fn bar(mut self, index: u8, kind: BarKind, size: u64) -> Self {
        self.bars.push(BarLayout { index, kind, prefetchable: false, size });
        self
    }

    /// Sets the INTx pin.
    #[must_use]
    pub fn pin(mut self, pin: InterruptPin) -> Self {
        self.pin = Some(pin);
        self
    }

    /// Adds MSI-X in a 32-bit BAR of its own.
    #[must_use]
    pub fn msix(mut self, bar: u8, count: u16, msi: Arc<dyn Msi>) -> Self {
        let layout = MsixLayout::exclusive(bar, count).expect("the test asks for a possible table");
        self.bars.push(BarLayout {
            index: bar,
            kind: BarKind::Memory32,
            prefetchable: false,
            size: layout.bar_size(),
        });
        self.msix = Some((layout, msi));
        self
    }

    /// Builds the function. Panics on invalid BARs.
    #[must_use]
    pub fn build(self) -> Arc<FakeFunction> {
        let mut builder = ConfigSpace::builder(Identity {
            vendor_id: 0x1234,
            device_id: 0x5678,
            revision: 1,
            class: ClassCode::OTHER,
            subsystem_vendor_id: 0x1234,
            subsystem_id: 0x0001,
        });
        for bar in &self.bars {
            builder.bar(*bar).expect("the test asks for possible BARs");
        }
        if let Some(pin) = self.pin {
            builder.interrupt_pin(pin);
        }
        builder.capability(CapabilityBuilder::power_management()).expect("there is room");
        builder
            .capability(CapabilityBuilder::express(ExpressKind::RootComplexIntegratedEndpoint))
            .expect("there is room");
        let msix = self.msix.map(|(layout, msi)| {
            builder.capability(CapabilityBuilder::msix(&layout)).expect("there is room");
            let vectors = msi.allocate(layout.count()).expect("fake vectors never run out");
            Msix::new(layout, vectors).expect("as many vectors as the layout has")
        });
        Arc::new(FakeFunction {
            name: self.name,
            config: Mutex::new(builder.build()),
            memory: Mutex::new(vec![vec![0; MEMORY]; 6]),
            msix,
            intx: IntxPin::new(),
        })
    }
}

/// A function with memory behind its BARs.
#[derive(Debug)]
pub struct FakeFunction {
    name: String,
    config: Mutex<ConfigSpace>,
    memory: Mutex<Vec<Vec<u8>>>,
    msix: Option<Msix>,
    intx: IntxPin,
}

#[derive(serde::Serialize, serde::Deserialize)]
struct SavedFake {
    config: SavedConfig,
    memory: Vec<Vec<u8>>,
    msix: Option<SavedMsix>,
}

impl FakeFunction {
    /// Starts building a function.
    #[must_use]
    pub fn builder(name: &str) -> FakeFunctionBuilder {
        FakeFunctionBuilder { name: name.to_owned(), bars: Vec::new(), pin: None, msix: None }
    }

    /// Returns its MSI-X, if any.
    #[must_use]
    pub fn msix(&self) -> Option<&Msix> {
        self.msix.as_ref()
    }

    /// Returns its INTx pin.
    #[must_use]
    pub fn intx(&self) -> &IntxPin {
        &self.intx
    }

    fn follow(&self, config: &ConfigSpace) {
        if let Some(msix) = &self.msix {
            msix.follow(config);
        }
        self.intx.follow(config).expect("fake lines never refuse");
    }
}

impl PciFunction for FakeFunction {
    fn name(&self) -> &str {
        &self.name
    }

    fn bars(&self) -> Vec<BarLayout> {
        lock(&self.config).bars().to_vec()
    }

    fn config_read(&self, offset: u16, data: &mut [u8]) {
        let mut config = lock(&self.config);
        self.intx.publish(&mut config);
        config.read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigEffect {
        let mut config = lock(&self.config);
        let effect = config.write(offset, data);
        self.follow(&config);
        effect
    }

    fn places(&self) -> Vec<BarPlace> {
        lock(&self.config).places()
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        if self.msix.as_ref().is_some_and(|msix| msix.bar_read(bar, offset, data)) {
            return;
        }
        let memory = lock(&self.memory);
        let Some(memory) = memory.get(usize::from(bar)) else { return data.fill(0xFF) };
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let source = memory.get(start..).unwrap_or_default();
        data.fill(0);
        for (byte, from) in data.iter_mut().zip(source) {
            *byte = *from;
        }
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        if self.msix.as_ref().is_some_and(|msix| msix.bar_write(bar, offset, data)) {
            return;
        }
        let mut memory = lock(&self.memory);
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(target) = memory.get_mut(usize::from(bar)).and_then(|memory| memory.get_mut(start..)) {
            for (byte, from) in target.iter_mut().zip(data) {
                *byte = *from;
            }
        }
    }

    fn doorbells(&self) -> Vec<Doorbell> {
        Vec::new()
    }

    fn mappings(&self) -> Vec<BarMapping> {
        Vec::new()
    }

    fn attach_intx(&self, line: Arc<dyn IntxLine>) {
        self.intx.attach(line).expect("fake lines never refuse");
    }

    fn reset(&self) -> Result<(), FunctionError> {
        let mut config = lock(&self.config);
        config.reset();
        if let Some(msix) = &self.msix {
            msix.reset();
        }
        lock(&self.memory).iter_mut().for_each(|memory| memory.fill(0));
        self.intx.set_pending(false).expect("fake lines never refuse");
        self.follow(&config);
        Ok(())
    }

    fn quiesce(&self) -> Result<(), FunctionError> {
        Ok(())
    }

    fn unquiesce(&self) -> Result<(), FunctionError> {
        Ok(())
    }

    fn save(&self) -> Result<SavedFunction, FunctionError> {
        let saved = SavedFake {
            config: lock(&self.config).save(),
            memory: lock(&self.memory).clone(),
            msix: self.msix.as_ref().map(Msix::save),
        };
        let state = serde_json::to_vec(&saved).map_err(|source| FunctionError::Failed {
            name: self.name.clone(),
            what: "serialise its state".to_owned(),
            source: Box::new(source),
        })?;
        Ok(SavedFunction { kind: "fake".to_owned(), version: 1, state })
    }

    fn inspect(&self) -> serde_json::Value {
        serde_json::json!({
            "config": lock(&self.config).inspect(),
            "msix": self.msix.as_ref().map(Msix::inspect),
        })
    }
}
