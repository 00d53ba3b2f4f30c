//! A vCPU that sleeps until it is kicked misses no interrupt of other threads.

use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

use apic::registers::END_OF_INTERRUPT;
use apic::{Action, Controllers, VcpuEvent};

use crate::common::*;

const ROUNDS: u32 = 2000;
/// Time limit, after which a sleep counts as a lost wake-up.
const HANG_LIMIT: Duration = Duration::from_secs(60);

/// A vCPU's sleep and kick, as a shell implements them.
#[derive(Default)]
struct Sleeper {
    kicked: Mutex<bool>,
    changed: Condvar,
}

impl Sleeper {
    fn kick(&self) {
        *self.kicked.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn sleep(&self) {
        let guard = self.kicked.lock().unwrap();
        let (mut guard, waited) =
            self.changed.wait_timeout_while(guard, HANG_LIMIT, |kicked| !*kicked).unwrap();
        assert!(!waited.timed_out(), "a wake-up was lost");
        *guard = false;
    }
}

/// Accepts interrupts and ends them, and notifies each vector's sender.
fn vcpu(controllers: &Controllers, sleeper: &Sleeper, ended: &[mpsc::Sender<()>]) {
    let port = controllers.vcpu(1).unwrap();
    let mut actions = Vec::new();
    for _ in 0..ROUNDS * u32::try_from(ended.len()).unwrap() {
        let vector = loop {
            match port.next_event(true, 0, &mut actions) {
                VcpuEvent::Interrupt { vector } => break vector,
                VcpuEvent::None => sleeper.sleep(),
                other => panic!("{other:?}"),
            }
        };
        port.write_msr(END_OF_INTERRUPT, 0, 0, &mut actions).unwrap();
        ended[usize::from(vector >> 4) - 4].send(()).unwrap();
    }
}

#[test]
fn no_wake_up_is_lost_between_threads() {
    let controllers = Arc::new(running(config()));
    set_pin(&controllers, 9, 1 << 56 | 0x8060);
    let sleeper = Arc::new(Sleeper::default());
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..3).map(|_| mpsc::channel()).unzip();
    std::thread::scope(|scope| {
        for (way, ended) in receivers.into_iter().enumerate() {
            let (controllers, sleeper) = (Arc::clone(&controllers), Arc::clone(&sleeper));
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let mut actions = Vec::new();
                    match way {
                        0 => actions = write(&controllers, 0, 0x830, 0x1_0000_0040),
                        1 => controllers.signal_msi(0xFEE0_1000, 0x50, &mut actions).unwrap(),
                        _ => controllers.assert_until_end(9, &mut actions).unwrap(),
                    }
                    assert!(
                        actions.len() <= 1
                            && actions.iter().all(|action| *action == Action::Kick { apic_id: 1 })
                    );
                    if !actions.is_empty() {
                        sleeper.kick();
                    }
                    ended.recv_timeout(HANG_LIMIT).expect("the interrupt is taken");
                }
            });
        }
        vcpu(&controllers, &sleeper, &senders);
    });
    assert_eq!(next(&controllers, 1), VcpuEvent::None);
}
