//! Base64 of Secrets and binaryData: the standard alphabet with padding; line breaks are skipped,
//! as Go's encoding/base64 does. RFC 4648.
#![deny(clippy::disallowed_methods)]

/// The bytes, or None where the text is not base64.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count, mut padding) = (0u32, 0, 0);
    for byte in text.bytes() {
        let value = match byte {
            b'\r' | b'\n' => continue,
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'=' if count >= 2 => {
                padding += 1;
                0
            }
            _ => return None,
        };
        if padding > 0 && byte != b'=' || padding > 2 {
            return None;
        }
        bits = bits << 6 | u32::from(value);
        count += 1;
        if count == 4 {
            let [_, a, b, c] = bits.to_be_bytes();
            out.extend_from_slice([a, b, c].get(..3 - padding).unwrap_or_default());
            (bits, count) = (0, 0);
            if padding > 0 {
                // Nothing may follow the padding; a line break may.
                let rest = text.trim_end_matches(['\r', '\n']);
                return rest.ends_with('=').then_some(out).filter(|_| text.matches('=').count() == padding);
            }
        }
    }
    (count == 0).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::decode;

    #[test]
    fn padding_and_line_breaks_are_read_and_nonsense_is_not() {
        for (text, bytes) in
            [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9v\nYmFy\n", "foobar"), ("Zg=\n=\n", "f")]
        {
            assert_eq!(decode(text).as_deref(), Some(bytes.as_bytes()), "{text}");
        }
        for bad in ["Z", "Zg", "Zg=", "Zg===", "Zg==Zg==", "Zm9v=", "====", "Zm 9v", "Zm9_", "=", "Z===", "Zg=g"] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
