//! The driver model.

use dma::Dma;
use dma::access::read_array;

use vmxnet3::pci::{BAR_COMMAND, BAR_DOORBELL};
use vmxnet3::registers::{self as r, command, feature, rx_mode};
use vmxnet3::{MacAddress, Offload};

use crate::Registers;
use crate::layout::{MAGIC, QUEUE_ENTRY, offset};

const PAGE: u64 = 4096;
/// Bytes of a TX or BODY buffer.
const SLOT: u64 = 4096;

/// Settings of the driver.
#[derive(Debug, Clone)]
pub struct DriverOptions {
    /// MTU in bytes.
    pub mtu: u32,
    /// Descriptors of the TX ring.
    pub tx_size: u32,
    /// Descriptors of RX rings 0 and 1.
    pub rx_sizes: [u32; 2],
    /// `uptFeatures` of the shared area.
    pub features: u64,
    /// `rxMode` of the shared area.
    pub rx_mode: u32,
    /// Group addresses.
    pub groups: Vec<MacAddress>,
    /// Accepted VLANs, besides frames without a tag.
    pub vlans: Vec<u16>,
    /// Below revision 7: ring 0 alternates HEAD and BODY buffers.
    pub old_ring_layout: bool,
    /// Number of interrupts: one for the queue pair and one for events.
    pub interrupts: u8,
}

impl DriverOptions {
    /// Bytes of memory that a driver with these options needs.
    #[must_use]
    pub fn memory_needed(&self) -> usize {
        let end = Driver::new(dma::HeapMemory::new(0), 0, self.clone()).end();
        usize::try_from(end).expect("less than the address space")
    }
}

impl Default for DriverOptions {
    fn default() -> Self {
        Self {
            mtu: 1500,
            tx_size: 64,
            rx_sizes: [64, 32],
            features: feature::RXCSUM | feature::RXVLAN,
            rx_mode: rx_mode::UNICAST | rx_mode::BROADCAST | rx_mode::MULTICAST,
            groups: Vec::new(),
            vlans: Vec::new(),
            old_ring_layout: false,
            interrupts: 2,
        }
    }
}

/// How to send a frame.
#[derive(Debug, Clone, Default)]
pub struct TransmitRequest {
    /// Offload for the device.
    pub offload: Offload,
    /// Bytes of headers, for segmentation.
    pub header_len: u16,
    /// VLAN tag to insert.
    pub vlan: Option<u16>,
    /// Where the frame is split into descriptors. A descriptor has at most one page; longer parts are split at pages.
    pub cuts: Vec<usize>,
}

/// A received frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedFrame {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// VLAN tag that the device removed.
    pub vlan: Option<u16>,
    /// Whether the device reports good checksums.
    pub good: bool,
    /// Number of buffers that it filled.
    pub pieces: usize,
}

#[derive(Debug, Clone, Copy)]
struct Ring {
    base: u64,
    size: u32,
    next: u32,
    generation: bool,
}

impl Ring {
    fn new(base: u64, size: u32) -> Self {
        Self { base, size, next: 0, generation: true }
    }

    fn address(&self) -> u64 {
        self.base + u64::from(self.next) * 16
    }

    fn advance(&mut self) {
        self.next += 1;
        if self.next == self.size {
            self.next = 0;
            self.generation = !self.generation;
        }
    }
}

/// A guest's driver with one queue pair, whose memory begins at a base address.
pub struct Driver<M> {
    memory: M,
    /// Its options; changes take effect at the next [`Driver::open`].
    pub options: DriverOptions,
    shared: u64,
    queues: u64,
    groups: u64,
    tx: Ring,
    tx_completion: Ring,
    /// Index of the first descriptor that the device still owns.
    tx_pending: u32,
    /// Last descriptor of each packet in flight.
    tx_packets: std::collections::VecDeque<u32>,
    tx_buffers: u64,
    rx: [Ring; 2],
    rx_reclaim: [u32; 2],
    rx_completion: Ring,
    rx_buffers: [u64; 2],
    partial: Option<ReceivedFrame>,
    end: u64,
}

impl<M: Dma> Driver<M> {
    /// Lays out a driver's memory from `base` (a page) on.
    pub fn new(memory: M, base: u64, options: DriverOptions) -> Self {
        let mut next = base;
        let mut take = |bytes: u64| {
            let at = next;
            next += bytes.next_multiple_of(PAGE);
            at
        };
        let bytes = |size: u32| u64::from(size) * 16;
        let slots = |size: u32| u64::from(size) * SLOT;
        let DriverOptions { tx_size, rx_sizes: [rx0, rx1], .. } = options;
        let (shared, queues, groups) = (take(PAGE), take(PAGE), take(PAGE));
        let tx = Ring::new(take(bytes(tx_size)), tx_size);
        let tx_completion = Ring::new(take(bytes(tx_size)), tx_size);
        let rx = [Ring::new(take(bytes(rx0)), rx0), Ring::new(take(bytes(rx1)), rx1)];
        let rx_completion = Ring::new(take(bytes(rx0 + rx1)), rx0 + rx1);
        let tx_buffers = take(slots(tx_size));
        let rx_buffers = [take(slots(rx0)), take(slots(rx1))];
        Self {
            memory,
            options,
            shared,
            queues,
            groups,
            tx,
            tx_completion,
            tx_pending: 0,
            tx_packets: std::collections::VecDeque::new(),
            tx_buffers,
            rx,
            rx_reclaim: [0; 2],
            rx_completion,
            rx_buffers,
            partial: None,
            end: next,
        }
    }

    /// First address after the driver's memory.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Guest address of the driver-shared area.
    #[must_use]
    pub fn shared_area(&self) -> u64 {
        self.shared
    }

    /// Guest addresses of the entries of the TX and the RX queue.
    #[must_use]
    pub fn queue_entries(&self) -> (u64, u64) {
        (self.queues, self.queues + QUEUE_ENTRY)
    }

    /// Guest addresses of the TX ring, RX rings and both completion rings (TX, RX).
    #[must_use]
    pub fn rings(&self) -> [u64; 5] {
        [self.tx.base, self.rx[0].base, self.rx[1].base, self.tx_completion.base, self.rx_completion.base]
    }

    fn put(&self, address: u64, bytes: &[u8]) {
        self.memory.write(address, bytes).expect("the driver's own memory");
    }

    fn put32(&self, address: u64, value: u32) {
        self.put(address, &value.to_le_bytes());
    }

    fn put64(&self, address: u64, value: u64) {
        self.put(address, &value.to_le_bytes());
    }

    fn get(&self, address: u64) -> [u32; 4] {
        let word = |i: u64| self.memory.load_u32(address + 4 * i).expect("the driver's own memory");
        // The generation is in word 3, which is read first.
        let last = word(3);
        [word(0), word(1), word(2), last]
    }

    /// Sends a command and returns its result.
    pub fn command(&self, registers: &mut impl Registers, code: u32) -> u32 {
        registers.store(BAR_COMMAND, r::CMD, code);
        registers.load(BAR_COMMAND, r::CMD)
    }

    /// The driver's probe and open. Returns the result of the activation, 0 for success.
    pub fn open(&mut self, registers: &mut impl Registers) -> u32 {
        assert_eq!(registers.load(BAR_COMMAND, r::VRRS) & 0x41, 0x41, "revisions");
        registers.store(BAR_COMMAND, r::VRRS, if self.options.old_ring_layout { 1 } else { 0x40 });
        assert_eq!(registers.load(BAR_COMMAND, r::UVRS) & 1, 1, "UPT version");
        registers.store(BAR_COMMAND, r::UVRS, 1);
        assert_eq!(self.command(registers, command::GET_MAX_QUEUES_CONF), 0x0101);
        assert_eq!(self.command(registers, command::GET_CONF_INTR), 0);
        let low = registers.load(BAR_COMMAND, r::MACL);
        let high = registers.load(BAR_COMMAND, r::MACH);
        assert_eq!(self.command(registers, command::GET_TXDATA_DESC_SIZE), 128);
        self.write_tables();
        registers.store(BAR_COMMAND, r::MACL, low);
        registers.store(BAR_COMMAND, r::MACH, high);
        let [a, b, c, d, e, f, g, h] = self.shared.to_le_bytes();
        registers.store(BAR_COMMAND, r::DSAL, u32::from_le_bytes([a, b, c, d]));
        registers.store(BAR_COMMAND, r::DSAH, u32::from_le_bytes([e, f, g, h]));
        let result = self.command(registers, command::ACTIVATE_DEV);
        if result != 0 {
            return result;
        }
        registers.store(BAR_DOORBELL, r::RXPROD, self.rx[0].next);
        registers.store(BAR_DOORBELL, r::RXPROD2, self.rx[1].next);
        for code in [command::UPDATE_RX_MODE, command::UPDATE_VLAN_FILTERS, command::UPDATE_MAC_FILTERS] {
            registers.store(BAR_COMMAND, r::CMD, code);
        }
        self.unmask(registers);
        0
    }

    /// Fills the shared area, the queue table and the RX rings.
    pub fn write_tables(&mut self) {
        for ring in [&self.tx, &self.tx_completion, &self.rx[0], &self.rx[1], &self.rx_completion] {
            self.memory.zero(ring.base, u64::from(ring.size) * 16).expect("the driver's own memory");
        }
        for ring in [&mut self.tx, &mut self.tx_completion, &mut self.rx_completion] {
            *ring = Ring::new(ring.base, ring.size);
        }
        self.rx = self.rx.map(|ring| Ring::new(ring.base, ring.size));
        (self.tx_pending, self.rx_reclaim) = (0, [0; 2]);
        self.tx_packets.clear();
        self.partial = None;

        let s = self.shared;
        self.memory.zero(s, 800).expect("the driver's own memory");
        self.put32(s, MAGIC);
        self.put32(s + 12, 2 | 1 << 2);
        self.put32(s + 16, 1);
        self.put32(s + 20, 1);
        self.write_features();
        self.put64(s + 40, self.queues);
        self.put32(s + 52, 512);
        self.put32(s + 56, self.options.mtu);
        self.put(s + 62, &[1, 1]);
        self.put(s + 80, &[1, self.options.interrupts, self.options.interrupts - 1]);
        self.put32(s + offset::INTERRUPT_CONTROL, 1);
        self.write_filters();

        let (tx, rx) = self.queue_entries();
        // The device owns txThreshold and updateRxProd: they stay as they are.
        self.put64(tx + 16, self.tx.base);
        self.put64(tx + 32, self.tx_completion.base);
        self.put32(tx + 56, self.tx.size);
        self.put32(tx + 64, self.tx_completion.size);
        self.put(tx + 72, &[0]);
        self.put64(rx + 16, self.rx[0].base);
        self.put64(rx + 24, self.rx[1].base);
        self.put64(rx + 32, self.rx_completion.base);
        self.put32(rx + 56, self.rx[0].size);
        self.put32(rx + 60, self.rx[1].size);
        self.put32(rx + 64, self.rx_completion.size);
        self.put(rx + 72, &[0]);
        self.fill(0);
        self.fill(1);
    }

    /// Writes the features to the shared area; a command makes the device read them.
    pub fn write_features(&self) {
        self.put64(self.shared + offset::FEATURES, self.options.features);
    }

    /// Writes receive mode, group addresses and VLANs to the shared area; commands make the device read them.
    pub fn write_filters(&self) {
        let s = self.shared;
        self.put32(s + offset::RX_MODE, self.options.rx_mode);
        let table: Vec<u8> = self.options.groups.iter().flat_map(|group| group.0).collect();
        assert!(table.len() as u64 <= PAGE, "a table of at most a page");
        self.put(self.groups, &table);
        let len = u16::try_from(table.len()).expect("less than a page");
        self.put(s + offset::MULTICAST_LENGTH, &len.to_le_bytes());
        self.put64(s + offset::MULTICAST_TABLE, self.groups);
        let mut vlans = [0_u8; 512];
        for vlan in self.options.vlans.iter().chain(&[0]) {
            vlans[usize::from(*vlan) / 8] |= 1 << (vlan % 8);
        }
        self.put(s + offset::VLAN_TABLE, &vlans);
    }

    /// HEAD buffers hold a frame of the MTU, but at most 3072 bytes.
    fn buffer(&self, ring: usize, index: u32) -> (u64, u32, bool) {
        let body = ring == 1 || self.options.old_ring_layout && index % 2 == 1;
        let len = if body { 4096 } else { (self.options.mtu + 22).min(3072) };
        (self.rx_buffers[ring] + u64::from(index) * SLOT, len, body)
    }

    /// Posts all free buffers of a ring but one.
    fn fill(&mut self, ring: usize) {
        loop {
            let own = self.rx[ring];
            if own.size == 0 || (own.next + 1) % own.size == self.rx_reclaim[ring] {
                return;
            }
            let (address, len, body) = self.buffer(ring, own.next);
            self.put64(own.address(), address);
            let word = len | u32::from(body) << 14 | u32::from(own.generation) << 31;
            self.memory.store_u32(own.address() + 8, word).expect("the driver's own memory");
            self.rx[ring].advance();
        }
    }

    /// Unmasks all interrupts.
    pub fn unmask(&self, registers: &mut impl Registers) {
        self.put32(self.shared + offset::INTERRUPT_CONTROL, 0);
        for vector in 0..u64::from(self.options.interrupts) {
            registers.store(BAR_DOORBELL, r::IMR + 8 * vector, 0);
        }
    }

    /// Event bits that the device has set.
    #[must_use]
    pub fn events(&self) -> u32 {
        self.memory.load_u32(self.shared + offset::EVENTS).expect("the driver's own memory")
    }

    /// State and error of the TX and the RX queue.
    #[must_use]
    pub fn status(&self) -> [(bool, u32); 2] {
        let (tx, rx) = self.queue_entries();
        [tx, rx].map(|entry| {
            let [stopped]: [u8; 1] =
                read_array(&self.memory, entry + offset::STOPPED).expect("the driver's own memory");
            let error = self.memory.load_u32(entry + offset::ERROR).expect("the driver's own memory");
            (stopped != 0, error)
        })
    }

    /// Statistics of the TX and the RX queue, as of the last command GET_STATS.
    #[must_use]
    pub fn statistics(&self) -> [[u64; 10]; 2] {
        let (tx, rx) = self.queue_entries();
        [tx, rx].map(|entry| {
            std::array::from_fn(|i| {
                let at = entry + offset::STATISTICS + 8 * i as u64;
                u64::from_le_bytes(read_array(&self.memory, at).expect("the driver's own memory"))
            })
        })
    }

    /// Number of free TX descriptors; one always stays unused.
    fn tx_room(&self) -> u32 {
        (self.tx_pending + self.tx.size - self.tx.next - 1) % self.tx.size
    }

    /// Sends a frame, and writes the doorbell if the device has enabled it. `false` when the ring is full.
    pub fn send(&mut self, registers: &mut impl Registers, frame: &[u8], request: &TransmitRequest) -> bool {
        let page = usize::try_from(SLOT).expect("a page");
        let mut pieces: Vec<&[u8]> = Vec::new();
        let mut rest = frame;
        for cut in request.cuts.iter().copied() {
            if cut > 0 && cut < rest.len() && pieces.len() < 6 {
                let (piece, after) = rest.split_at(cut.min(page));
                pieces.push(piece);
                rest = after;
            }
        }
        pieces.extend(rest.chunks(page));
        if pieces.is_empty() || u32::try_from(pieces.len()).expect("few pieces") > self.tx_room() {
            return false;
        }
        let (mode, header_len, msscof) = match request.offload {
            Offload::None | Offload::Verified => (0, 0, 0),
            Offload::Checksum { start, at } => (2, start, at),
            Offload::Tso { mss } => (3, request.header_len, mss),
        };
        let first = self.tx.address();
        let mut first_word = 0;
        let mut last = 0;
        for (position, piece) in pieces.iter().enumerate() {
            let address = self.tx_buffers + u64::from(self.tx.next) * SLOT;
            self.put(address, piece);
            let descriptor = self.tx.address();
            self.put64(descriptor, address);
            let (sop, eop) = (position == 0, position + 1 == pieces.len());
            let mut word3 = 0;
            let mut word2 = u32::try_from(piece.len()).expect("a page") & 0x3FFF;
            if sop {
                word2 |= u32::from(msscof) << 18;
                word3 |= u32::from(header_len) | mode << 10;
                if let Some(tag) = request.vlan {
                    word3 |= 1 << 15 | u32::from(tag) << 16;
                }
            }
            if eop {
                word3 |= 1 << 12 | 1 << 13;
            }
            self.put32(descriptor + 12, word3);
            // The first one keeps the other generation until all are written.
            word2 |= u32::from(self.tx.generation ^ sop) << 14;
            self.put32(descriptor + 8, word2);
            if sop {
                first_word = word2 ^ 1 << 14;
            }
            last = self.tx.next;
            self.tx.advance();
        }
        self.tx_packets.push_back(last);
        self.memory.store_u32(first + 8, first_word).expect("the driver's own memory");
        let (tx, _) = self.queue_entries();
        let deferred = self.memory.load_u32(tx).expect("the driver's own memory") + 1;
        let threshold = self.memory.load_u32(tx + offset::TX_THRESHOLD).expect("the driver's own memory");
        if deferred >= threshold {
            self.put32(tx, 0);
            registers.store(BAR_DOORBELL, r::TXPROD, self.tx.next);
        } else {
            self.put32(tx, deferred);
        }
        true
    }

    /// Reclaims completed packets and returns their number.
    ///
    /// # Panics
    /// When a completion is out of order or isn't that of a packet's last descriptor (a `BUG_ON` in Linux).
    pub fn reap(&mut self) -> usize {
        let mut count = 0;
        loop {
            let [index, _, _, word] = self.get(self.tx_completion.address());
            if (word >> 31 != 0) != self.tx_completion.generation {
                return count;
            }
            assert_eq!(word >> 24 & 0x7F, 0, "type of a TX completion");
            let expected = self.tx_packets.pop_front().expect("a completion without a packet");
            assert_eq!(index & 0xFFF, expected, "a completion for another descriptor");
            self.tx_pending = (expected + 1) % self.tx.size;
            self.tx_completion.advance();
            count += 1;
        }
    }

    /// Number of packets that the device still owns.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.tx_packets.len()
    }

    /// Consumes received frames and posts their buffers again, with doorbells if the device has enabled them.
    ///
    /// # Panics
    /// Where Linux has a `BUG_ON`.
    pub fn receive(&mut self, registers: &mut impl Registers) -> Vec<ReceivedFrame> {
        let mut frames = Vec::new();
        loop {
            let [word0, _, word2, word3] = self.get(self.rx_completion.address());
            if (word3 >> 31 != 0) != self.rx_completion.generation {
                break;
            }
            self.rx_completion.advance();
            assert_eq!(word3 >> 24 & 0x7F, 3, "type of an RX completion");
            let ring = usize::try_from(word0 >> 16 & 0x3FF).expect("10 bits");
            assert!(ring < 2, "ring id {ring}");
            let index = word0 & 0xFFF;
            assert!(index < self.rx[ring].size, "index {index}");
            let (address, buffer, body) = self.buffer(ring, index);
            let descriptor = self.get(self.rx[ring].base + u64::from(index) * 16);
            assert_eq!(
                u64::from(descriptor[0]) | u64::from(descriptor[1]) << 32,
                address,
                "a descriptor changed"
            );
            let (sop, eop) = (word0 & 1 << 15 != 0, word0 & 1 << 14 != 0);
            assert_eq!(body, !sop, "a frame begins in a HEAD buffer and goes on in BODY buffers");
            let len = word2 & 0x3FFF;
            assert!(len > 0 && len <= buffer, "{len} bytes in a buffer of {buffer}");
            let mut bytes = vec![0; usize::try_from(len).expect("14 bits")];
            self.memory.read(address, &mut bytes).expect("the driver's own memory");
            // Bytes that were read must not be read again.
            self.memory.zero(address, u64::from(len)).expect("the driver's own memory");
            if sop {
                assert!(self.partial.is_none(), "a frame begins in another");
                self.partial = Some(ReceivedFrame { bytes: Vec::new(), vlan: None, good: false, pieces: 0 });
            }
            let mut frame = self.partial.take().expect("a frame without beginning");
            frame.bytes.extend(bytes);
            frame.pieces += 1;
            if eop {
                frame.vlan = (word2 & 1 << 15 != 0).then(|| u16::try_from(word2 >> 16).expect("16 bits"));
                frame.good = word0 & 1 << 30 == 0;
                if frame.good {
                    assert!(word3 & 3 << 17 != 0 && word3 & 3 << 20 != 0, "good, but of what? {word3:#x}");
                    assert_eq!(word3 & (1 << 16 | 1 << 19), 1 << 16 | 1 << 19);
                    assert_eq!(word3 & 1 << 22, 0, "a fragment is never good");
                    assert_eq!(word3 & 0xFFFF, 0, "no sum");
                }
                frames.push(frame);
            } else {
                self.partial = Some(frame);
            }
            self.rx_reclaim[ring] = (index + 1) % self.rx[ring].size;
            self.fill(ring);
            let (_, rx) = self.queue_entries();
            let [update]: [u8; 1] =
                read_array(&self.memory, rx + offset::UPDATE_RX_PROD).expect("the driver's own memory");
            if update != 0 {
                let register = if ring == 0 { r::RXPROD } else { r::RXPROD2 };
                registers.store(BAR_DOORBELL, register, self.rx[ring].next);
            }
        }
        frames
    }
}
