//! Guest memory of a node in the model checker's world.

use std::collections::VecDeque;

use dsm::names::{Access, Page};
use dsm::pages::Pages;

use super::{PAGES, SIZE};
use crate::litmus::Var;

/// Guest memory of one node, with the store buffers of its vCPUs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Memory {
    pub content: [[u8; SIZE]; PAGES],
    pub access: [Access; PAGES],
    pub buffers: Vec<VecDeque<(Var, u8)>>,
    /// Pages whose rights were lowered in this step, with the new rights.
    pub lowered: Vec<(Page, Access)>,
}

fn index(page: Page) -> usize {
    usize::try_from(page).unwrap_or(usize::MAX)
}

impl Memory {
    pub fn put(&mut self, var: Var, value: u8) {
        self.content[usize::from(var.page)][usize::from(var.offset)] = value;
    }

    pub fn drain(&mut self, vcpu: usize) {
        while let Some((var, value)) = self.buffers[vcpu].pop_front() {
            self.put(var, value);
        }
    }
}

impl Pages for Memory {
    fn size(&self) -> usize {
        SIZE
    }

    fn read(&self, page: Page, into: &mut Vec<u8>) {
        into.clear();
        into.extend_from_slice(&self.content[index(page)]);
    }

    fn write(&mut self, page: Page, offset: usize, bytes: &[u8]) {
        self.content[index(page)][offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn protect(&mut self, page: Page, access: Access) {
        if access < self.access[index(page)] {
            // The interrupt that invalidates a translation on other CPUs drains their store buffers.
            for vcpu in 0..self.buffers.len() {
                self.drain(vcpu);
            }
            self.lowered.push((page, access));
        }
        self.access[index(page)] = access;
    }
}
