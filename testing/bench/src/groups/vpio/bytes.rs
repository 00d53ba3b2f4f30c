//! Converts bytes of a bus access to a register's value: at most four, little-endian.

/// Answers a read.
pub fn answer(data: &mut [u8], value: u32) {
    for (into, byte) in data.iter_mut().zip(value.to_le_bytes()) {
        *into = byte;
    }
}

/// Returns a write's number of bytes, and its value.
pub fn written(data: &[u8]) -> (usize, u32) {
    let mut value = [0; 4];
    for (into, byte) in value.iter_mut().zip(data) {
        *into = *byte;
    }
    (data.len().min(4), u32::from_le_bytes(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wider_than_a_register_is_cut() {
        assert_eq!(written(&[1, 2]), (2, 0x201));
        assert_eq!(written(&[1, 2, 3, 4, 5]), (4, 0x403_0201));
        let mut data = [9; 5];
        answer(&mut data, 0x0403_0201);
        assert_eq!(data, [1, 2, 3, 4, 9]);
    }
}
