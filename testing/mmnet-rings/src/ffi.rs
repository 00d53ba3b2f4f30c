//! Declarations of `c/rings.h`.

use core::ffi::{c_char, c_int, c_uint, c_void};

use crate::Part;

/// Limit of a message's parts (`CW_NB_MOST_PARTS`).
pub(crate) const MOST_PARTS: usize = 32;

/// A received message: `struct rings_message`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawMessage {
    pub(crate) id: u32,
    pub(crate) note: u32,
    pub(crate) kind: u16,
    pub(crate) count: u16,
    pub(crate) bytes: u64,
    pub(crate) parts: [Part; MOST_PARTS],
}

/// An opaque `struct rings`.
#[repr(C)]
pub(crate) struct Raw {
    _private: [u8; 0],
}

unsafe extern "C" {
    pub(crate) fn rings_segment(bytes: usize) -> *mut c_void;
    pub(crate) fn rings_segment_free(segment: *mut c_void);
    pub(crate) fn rings_new(
        segment: *mut c_void,
        entries: u32,
        epoch: u32,
        own: u32,
        peer: u32,
        base: u64,
        stride: u64,
        slots: u32,
        extents: *const [u64; 2],
        count: c_uint,
    ) -> *mut Raw;
    pub(crate) fn rings_free(rings: *mut Raw);
    pub(crate) fn rings_third(
        rings: *mut Raw,
        slot: u32,
        extents: *const [u64; 2],
        count: c_uint,
        common: bool,
    ) -> bool;
    pub(crate) fn rings_third_uses(rings: *const Raw, slot: u32) -> c_int;
    pub(crate) fn rings_post(
        rings: *mut Raw,
        parts: *const Part,
        count: c_uint,
        kind: u16,
        note: u32,
        cookie: u64,
    ) -> c_int;
    pub(crate) fn rings_poll(rings: *mut Raw) -> bool;
    pub(crate) fn rings_received(rings: *mut Raw, message: *mut RawMessage) -> bool;
    pub(crate) fn rings_sent(rings: *mut Raw, cookie: *mut u64, status: *mut u32) -> bool;
    pub(crate) fn rings_complete(rings: *mut Raw, id: u32, status: u32);
    pub(crate) fn rings_kick(rings: *mut Raw);
    pub(crate) fn rings_end(rings: *mut Raw);
    pub(crate) fn rings_signals(rings: *const Raw) -> u32;
    pub(crate) fn rings_rooms(rings: *const Raw) -> u64;
    pub(crate) fn rings_violation(rings: *const Raw) -> *const c_char;
}
