//! Plain scalars by the YAML 1.1 rules of Go's yaml.v2, which Kubernetes has always used:
//! `0644` and `0o644` are 420, `yes` is true, `08` is 8, `1_000` is 1000, a date is text.
#![deny(clippy::disallowed_methods)]

use super::node::Value;

/// What a scalar without quotes and without a tag means.
pub fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => return Value::Bool(true),
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => return Value::Bool(false),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => return Value::Float(f64::INFINITY),
        "-.inf" | "-.Inf" | "-.INF" => return Value::Float(f64::NEG_INFINITY),
        ".nan" | ".NaN" | ".NAN" => return Value::Float(f64::NAN),
        _ => {}
    }
    let number = match text.as_bytes().first() {
        Some(b'0'..=b'9' | b'+' | b'-') => {
            let digits = text.replace('_', "");
            integer(&digits).or_else(|| float(&digits))
        }
        Some(b'.') => float(text),
        _ => None,
    };
    number.unwrap_or_else(|| Value::Text(text.to_owned()))
}

/// Go's `ParseInt(text, 0, 64)`, then `ParseUint`.
fn integer(text: &str) -> Option<Value> {
    let (negative, body) = match text.as_bytes().first()? {
        b'-' => (true, text.get(1..)?),
        b'+' => (false, text.get(1..)?),
        _ => (false, text),
    };
    let (radix, digits) = match body.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, body.get(2..)?),
        [b'0', b'o' | b'O', ..] => (8, body.get(2..)?),
        [b'0', b'b' | b'B', ..] => (2, body.get(2..)?),
        [b'0', _, ..] => (8, body.get(1..)?),
        _ => (10, body),
    };
    // from_str_radix would take a second sign.
    if !digits.starts_with(|c: char| c.is_ascii_hexdigit()) {
        return None;
    }
    let size = i128::from(u64::from_str_radix(digits, radix).ok()?);
    let value = if negative { -size } else { size };
    match i64::try_from(value) {
        Ok(value) => Some(Value::Int(value)),
        Err(_) => u64::try_from(value).ok().map(Value::Uint),
    }
}

/// `[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?` that fits a double.
fn float(text: &str) -> Option<Value> {
    let body = text.strip_prefix(['+', '-']).unwrap_or(text);
    let (mantissa, exponent) = match body.find(['e', 'E']) {
        Some(at) => (body.get(..at)?, Some(body.get(at + 1..)?)),
        None => (body, None),
    };
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let shaped = digits(whole) && digits(fraction) && !(whole.is_empty() && fraction.is_empty());
    let powered = exponent.is_none_or(|e| {
        let e = e.strip_prefix(['+', '-']).unwrap_or(e);
        !e.is_empty() && digits(e)
    });
    if !shaped || !powered {
        return None;
    }
    let value: f64 = text.parse().ok()?;
    value.is_finite().then(|| Value::from_float(value))
}
