//! Timer codes (IBTA volume 1, 9.7.5 and 9.7.6). All times are nanoseconds.

/// RNR timer codes in units of 10 microseconds; code 0 is the longest.
const RNR: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// How long a requester waits after an RNR NAK with this timer code (5 bits), nanoseconds.
#[inline]
#[must_use]
pub fn rnr_wait(code: u8) -> u64 {
    u64::from(RNR[usize::from(code % 32)]) * 10_000
}

/// The local ACK timeout T of a code (5 bits): 4.096 us * 2^code, in nanoseconds; `None` (code 0) is no timeout.
#[inline]
#[must_use]
pub fn ack_timeout(code: u8) -> Option<u64> {
    match code % 32 {
        0 => None,
        code => Some(4096u64 << code),
    }
}

/// Limit of doublings of the timeout: IBTA permits detection after T to 4T.
const MOST_DOUBLINGS: u32 = 2;

/// Timeout after `timeouts` timeouts in a row (exponential back-off): T, 2T, then 4T each time.
#[inline]
#[must_use]
pub fn backed_off(code: u8, timeouts: u32) -> Option<u64> {
    Some(ack_timeout(code)? << timeouts.min(MOST_DOUBLINGS))
}

/// Upper bound of the time until a request to an unresponsive peer ends with `RetryExceeded`, from its last transmission or the last
/// progress on. It is the sum of the waits of `retry_count + 1` tries, between `(n + 1) * T` and `(n + 1) * 4T`. `None` when there is no
/// timeout.
#[must_use]
pub fn time_to_failure(code: u8, retry_count: u8) -> Option<u64> {
    (0..=u32::from(retry_count % 8)).map(|round| backed_off(code, round)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_codes_are_those_of_the_specification() {
        let milliseconds = [
            655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28, 1.92,
            2.56, 3.84, 5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84, 245.76,
            327.68, 491.52,
        ];
        for (code, expected) in (0u8..).zip(milliseconds) {
            let expected: f64 = expected * 1e6;
            #[allow(clippy::cast_precision_loss)]
            let got = rnr_wait(code) as f64;
            assert!((got - expected).abs() < 1.0, "code {code}: {got} instead of {expected}");
        }
    }

    #[test]
    fn ack_timeouts_are_those_of_the_specification() {
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(1), Some(8192));
        assert_eq!(ack_timeout(14), Some(67_108_864));
        assert_eq!(ack_timeout(19), Some(2_147_483_648));
        assert_eq!(ack_timeout(31), Some(4096 << 31));
    }

    #[test]
    fn a_dead_peer_is_found_within_the_specified_time() {
        for code in 1..32 {
            let t = ack_timeout(code).unwrap();
            for retry_count in 0..8 {
                let total = time_to_failure(code, retry_count).unwrap();
                let tries = u64::from(retry_count) + 1;
                assert!(total >= tries * t && total <= tries * 4 * t);
                for round in 0..=u32::from(retry_count) {
                    let wait = backed_off(code, round).unwrap();
                    assert!(wait >= t && wait <= 4 * t);
                }
            }
        }
        assert_eq!(time_to_failure(14, 7), Some(27 * 67_108_864));
        assert_eq!(time_to_failure(0, 7), None);
    }
}
