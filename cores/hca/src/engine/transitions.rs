//! The state table of queue pairs (IBTA volume 1, table 91).

use crate::attributes::{QpAttributeMask as Mask, QpKind, QpState as State};

/// Attributes that a transition requires and permits, besides STATE. `None` when the transition doesn't exist.
pub(super) fn transition(kind: QpKind, from: State, to: State) -> Option<(Mask, Mask)> {
    use State::{
        Error, Init, ReadyToReceive as Rtr, ReadyToSend as Rts, Reset, SendQueueDrained as Sqd,
        SendQueueError as Sqe,
    };
    let none = Mask::empty();
    let connected = matches!(kind, QpKind::Rc | QpKind::Uc);
    Some(match (from, to) {
        (_, Reset) => (none, none),
        (Reset, Error) => return None,
        (_, Error) => (none, none),
        (Reset, Init) => (first(kind), none),
        (Init, Init) => (none, first(kind)),
        (Init, Rtr) if connected => (connect(kind), connect_optional()),
        (Init, Rtr) => (none, Mask::PKEY_INDEX | Mask::QKEY),
        (Rtr, Rts) if kind == QpKind::Rc => {
            let required =
                Mask::SQ_PSN | Mask::TIMEOUT | Mask::RETRY_COUNT | Mask::RNR_RETRY | Mask::MAX_RD_ATOMIC;
            (required, running(kind))
        }
        (Rtr, Rts) => (Mask::SQ_PSN, running(kind)),
        (Rts, Rts) | (Sqd, Rts) => (none, running(kind)),
        (Sqe, Rts) if kind != QpKind::Rc => (none, running(kind)),
        (Rts, Sqd) => (none, Mask::SQD_NOTIFY),
        (Sqd, Sqd) => (none, drained(kind)),
        _ => return None,
    })
}

/// RESET to INIT.
fn first(kind: QpKind) -> Mask {
    match kind {
        QpKind::Rc | QpKind::Uc => Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS,
        QpKind::Ud => Mask::PKEY_INDEX | Mask::PORT | Mask::QKEY,
        QpKind::Gsi => Mask::PKEY_INDEX | Mask::QKEY,
    }
}

/// INIT to RTR.
fn connect(kind: QpKind) -> Mask {
    let all = Mask::ADDRESS_VECTOR | Mask::PATH_MTU | Mask::DESTINATION_QPN | Mask::RQ_PSN;
    match kind {
        QpKind::Rc => all | Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER,
        _ => all,
    }
}

fn connect_optional() -> Mask {
    Mask::ALTERNATE_PATH | Mask::ACCESS_FLAGS | Mask::PKEY_INDEX
}

/// To RTS, and RTS to RTS.
fn running(kind: QpKind) -> Mask {
    match kind {
        QpKind::Rc => {
            Mask::CURRENT_STATE
                | Mask::ALTERNATE_PATH
                | Mask::ACCESS_FLAGS
                | Mask::MIN_RNR_TIMER
                | Mask::PATH_MIGRATION
        }
        QpKind::Uc => Mask::CURRENT_STATE | Mask::ALTERNATE_PATH | Mask::ACCESS_FLAGS | Mask::PATH_MIGRATION,
        QpKind::Ud | QpKind::Gsi => Mask::CURRENT_STATE | Mask::QKEY,
    }
}

/// SQD to SQD.
fn drained(kind: QpKind) -> Mask {
    let connected = Mask::PORT
        | Mask::ADDRESS_VECTOR
        | Mask::ALTERNATE_PATH
        | Mask::ACCESS_FLAGS
        | Mask::PKEY_INDEX
        | Mask::PATH_MIGRATION;
    match kind {
        QpKind::Rc => {
            connected
                | Mask::TIMEOUT
                | Mask::RETRY_COUNT
                | Mask::RNR_RETRY
                | Mask::MAX_RD_ATOMIC
                | Mask::MAX_DEST_RD_ATOMIC
                | Mask::MIN_RNR_TIMER
        }
        QpKind::Uc => connected,
        QpKind::Ud | QpKind::Gsi => Mask::PKEY_INDEX | Mask::QKEY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 7] = [
        State::Reset,
        State::Init,
        State::ReadyToReceive,
        State::ReadyToSend,
        State::SendQueueDrained,
        State::SendQueueError,
        State::Error,
    ];

    #[test]
    fn every_state_resets_and_all_but_reset_fail() {
        for kind in [QpKind::Rc, QpKind::Uc, QpKind::Ud, QpKind::Gsi] {
            for from in STATES {
                assert!(transition(kind, from, State::Reset).is_some());
                assert_eq!(transition(kind, from, State::Error).is_some(), from != State::Reset);
            }
        }
    }

    #[test]
    fn a_queue_pair_comes_up_step_by_step_only() {
        let count = |kind| {
            let pairs = STATES.iter().flat_map(|from| STATES.map(|to| (*from, to)));
            pairs.filter(|(from, to)| transition(kind, *from, *to).is_some()).count()
        };
        // 7 to RESET, 6 to ERR, RESET-INIT, INIT-INIT, INIT-RTR, RTR-RTS, RTS-RTS, RTS-SQD, SQD-SQD, SQD-RTS.
        assert_eq!(count(QpKind::Rc), 21);
        // And SQE-RTS.
        assert_eq!(count(QpKind::Uc), 22);
        assert_eq!(count(QpKind::Ud), 22);
        assert_eq!(transition(QpKind::Rc, State::Reset, State::ReadyToSend), None);
    }
}
