//! resource.Quantity: `100m`, `64Mi`, `1.5Gi`, `1e3`. Kept as written, read as nano-units.
#![deny(clippy::disallowed_methods)]

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A quantity as written in the manifest together with its exact value.
///
/// The value is in billionths (nano), which holds every legal suffix down to `n`; it saturates
/// at the API's own bound of 2^63-1 whole units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantity {
    text: String,
    nano: i128,
}

/// Why a text is no quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no quantity: write a number with an optional suffix, such as 500m, 64Mi, 2 or 1e3")]
pub struct BadQuantity(pub String);

impl Quantity {
    pub fn parse(text: &str) -> Result<Quantity, BadQuantity> {
        let bad = || BadQuantity(text.chars().take(64).collect());
        let body = text.strip_prefix(['+', '-']).unwrap_or(text);
        let digits = body.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(body.len());
        let (number, suffix) = body.split_at(digits);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(bad());
        }
        // mantissa * 10^-fraction.len() * scale, rounded away from zero below one nano.
        const LIMIT: i128 = i64::MAX as i128 * 1_000_000_000;
        let (scale, exponent): (i128, i32) = match suffix {
            "" => (1, 0),
            "n" => (1, -9),
            "u" => (1, -6),
            "m" => (1, -3),
            "k" => (1, 3),
            "M" => (1, 6),
            "G" => (1, 9),
            "T" => (1, 12),
            "P" => (1, 15),
            "E" => (1, 18),
            "Ki" => (1 << 10, 0),
            "Mi" => (1 << 20, 0),
            "Gi" => (1 << 30, 0),
            "Ti" => (1 << 40, 0),
            "Pi" => (1 << 50, 0),
            "Ei" => (1 << 60, 0),
            e => {
                let power = e.strip_prefix(['e', 'E']).ok_or_else(bad)?;
                let exponent: i32 = power.parse().map_err(|_| bad())?;
                if !(-40..=40).contains(&exponent) {
                    return Err(bad());
                }
                (1, exponent)
            }
        };
        if number.len() > 60 {
            return Err(bad());
        }
        let mut exponent = exponent + 9 - fraction.len() as i32;
        let mut value: i128 = 0;
        for digit in whole.bytes().chain(fraction.bytes()) {
            match value.checked_mul(10).and_then(|v| v.checked_add(i128::from(digit - b'0'))) {
                Some(v) => value = v,
                None => return Err(bad()),
            }
        }
        value = value.checked_mul(scale).unwrap_or(i128::MAX);
        while exponent > 0 && value < LIMIT {
            value = value.saturating_mul(10);
            exponent -= 1;
        }
        while exponent < 0 && value != 0 {
            value = value / 10 + i128::from(value % 10 != 0);
            exponent += 1;
            if value == 1 && exponent < 0 {
                exponent = 0; // rounds up to the smallest unit
            }
        }
        value = value.min(LIMIT);
        Ok(Quantity { text: text.to_owned(), nano: if text.starts_with('-') { -value } else { value } })
    }

    /// Whole units, rounded up: bytes, counts.
    pub fn units(&self) -> i64 {
        let up = self.nano.div_euclid(1_000_000_000) + i128::from(self.nano.rem_euclid(1_000_000_000) != 0);
        up.clamp(i64::MIN.into(), i64::MAX.into()) as i64
    }

    /// Thousandths, rounded up: milli-CPU.
    pub fn milli(&self) -> i64 {
        let up = self.nano.div_euclid(1_000_000) + i128::from(self.nano.rem_euclid(1_000_000) != 0);
        up.clamp(i64::MIN.into(), i64::MAX.into()) as i64
    }

    pub fn is_zero(&self) -> bool {
        self.nano == 0
    }

    pub fn is_negative(&self) -> bool {
        self.nano < 0
    }

    pub fn nano(&self) -> i128 {
        self.nano
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Quantity, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Quantity;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a quantity such as 500m, 64Mi or 2")
            }
            fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<Quantity, E> {
                Quantity::parse(v).map_err(E::custom)
            }
            fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<Quantity, E> {
                self.visit_str(&v.to_string())
            }
            fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<Quantity, E> {
                self.visit_str(&v.to_string())
            }
            fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<Quantity, E> {
                self.visit_str(&v.to_string())
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_mean_what_the_api_says() {
        for (text, units, milli) in [
            ("0", 0, 0),
            ("1", 1, 1000),
            ("100m", 1, 100),
            ("64Mi", 67_108_864, 67_108_864_000),
            ("1.5Gi", 1_610_612_736, 1_610_612_736_000),
            ("1e3", 1000, 1_000_000),
            ("0.5", 1, 500),
            (".5", 1, 500),
            ("1n", 1, 1),
            ("2k", 2000, 2_000_000),
            ("-1", -1, -1000),
            ("0.0001", 1, 1),
        ] {
            let q = Quantity::parse(text).unwrap();
            assert_eq!((q.units(), q.milli()), (units, milli), "{text}");
            assert_eq!(q.to_string(), text);
        }
    }

    #[test]
    fn nonsense_is_refused_and_the_huge_saturates() {
        for bad in ["", "m", "1.2.3", "1 Mi", "1mi", "0x10", "1e", "--1", "1e99", "."] {
            assert!(Quantity::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(Quantity::parse("99999999999Ei").unwrap().units(), i64::MAX);
    }
}
