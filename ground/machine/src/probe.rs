//! Whether kernel code runs natively under this host's KVM.
