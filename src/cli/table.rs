//! Tables for people: columns as wide as their widest cell, two spaces between, no trailing ones.
//! Invariant: a cell is one line and cannot move the cursor, whatever a pod put into it.

/// Renders rows under their titles.
pub fn render(titles: &[&str], rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| clean(cell)).collect()).collect();
    let width = |column: usize, title: &str| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(std::iter::once(title.len())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = titles.iter().enumerate().map(|(n, title)| width(n, title)).collect();
    let titles: Vec<String> = titles.iter().map(|t| (*t).to_owned()).collect();
    let mut out = String::new();
    for row in std::iter::once(&titles).chain(&rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', width.saturating_sub(cell.chars().count()) + 2));
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// One line without control characters; an empty cell shows as `<none>`.
pub fn clean(text: &str) -> String {
    if text.is_empty() {
        return "<none>".to_owned();
    }
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A duration in kubectl's words: `5s`, `3m20s`, `4h5m`, `2d3h`, `12d`, `3y20d`.
pub fn age(nanos: i64) -> String {
    let seconds = nanos / 1_000_000_000;
    if seconds < 0 {
        // The wall clock went back.
        return "0s".to_owned();
    }
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    let two = |big: i64, unit: char, small: i64, small_unit: char| {
        if small == 0 { format!("{big}{unit}") } else { format!("{big}{unit}{small}{small_unit}") }
    };
    if seconds < 120 {
        format!("{seconds}s")
    } else if minutes < 10 {
        two(minutes, 'm', seconds % 60, 's')
    } else if minutes < 180 {
        format!("{minutes}m")
    } else if hours < 8 {
        two(hours, 'h', minutes % 60, 'm')
    } else if hours < 48 {
        format!("{hours}h")
    } else if hours < 192 {
        two(hours / 24, 'd', hours % 24, 'h')
    } else if hours < 24 * 365 * 2 {
        format!("{}d", hours / 24)
    } else if hours < 24 * 365 * 8 {
        two(hours / 24 / 365, 'y', (hours / 24) % 365, 'd')
    } else {
        format!("{}y", hours / 24 / 365)
    }
}

/// `4.2MB`, `612kB`: decimal, as registries and disks count.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let name = UNITS.get(unit).copied().unwrap_or("B");
    if unit == 0 || value >= 99.95 { format!("{value:.0}{name}") } else { format!("{value:.1}{name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_cells_stay_cells() {
        let rows =
            vec![vec!["web".into(), "1/1".into(), "a\x1b[2J\nb".into()], vec!["längerer".into(), String::new(), "x".into()]];
        let text = render(&["NAME", "READY", "X"], &rows);
        assert_eq!(text, "NAME      READY   X\nweb       1/1     a\u{fffd}[2J\u{fffd}b\nlängerer  <none>  x\n");
    }

    #[test]
    fn ages_are_kubectls() {
        let cases = [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (200, "3m20s"),
            (600, "10m"),
            (10_799, "179m"),
            (10_800, "3h"),
            (14_700, "4h5m"),
            (28_800, "8h"),
            (172_800, "2d"),
            (183_600, "2d3h"),
            (691_200, "8d"),
            (-5, "0s"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(age(seconds * 1_000_000_000), expected, "{seconds}");
        }
    }

    #[test]
    fn bytes_round_as_people_do() {
        let cases = [
            (0, "0B"),
            (999, "999B"),
            (1000, "1.0kB"),
            (999_499, "999kB"),
            (999_501, "1.0MB"),
            (4_230_000, "4.2MB"),
            (120_000_000, "120MB"),
        ];
        for (n, expected) in cases {
            assert_eq!(bytes(n), expected, "{n}");
        }
    }
}
