//! Help texts, made from the table that the parser reads.

use std::fmt::Write;

use super::args::{Verb, flags};

const WIDTH: usize = 100;

pub fn overview(verbs: &[&Verb]) -> String {
    let mut out = String::from(
        "coracle: a Kubernetes node in one file\n\n\
         Usage: coracle VERB [flags]\n\nVerbs:\n",
    );
    let listed = || verbs.iter().filter(|v| !v.summary.is_empty());
    let width = listed().map(|v| v.name.len()).max().unwrap_or(0);
    for verb in listed() {
        line(&mut out, verb.name, width, verb.summary);
    }
    out.push_str(
        "\n`coracle help VERB` tells more, with examples.\n\n\
         stdout is the result, stderr the talk. Exit codes: 0 done, 1 failed, 2 usage, 3 no agent,\n\
         4 not found, 125 exec could not run the command; exec passes its command's own code on.\n",
    );
    out
}

pub fn of(verb: &Verb) -> String {
    let mut usage = format!("Usage: coracle {}", verb.name);
    if flags(verb).count() > 1 {
        usage.push_str(" [flags]");
    }
    if !verb.operands.text.is_empty() {
        usage.push(' ');
        usage.push_str(verb.operands.text);
    }
    if verb.command {
        usage.push_str(" -- COMMAND [ARG...]");
    }
    let mut out = format!("{usage}\n\n{}\n\nFlags:\n", wrap(verb.about, 0));
    let rows: Vec<(String, &str)> = flags(verb)
        .map(|flag| {
            let short = flag.short.map_or("    ".to_owned(), |c| format!("-{c}, "));
            let value = flag.value.map_or(String::new(), |v| format!(" {v}"));
            (format!("{short}--{}{value}", flag.long), flag.help)
        })
        .collect();
    let width = rows.iter().map(|(left, _)| left.len()).max().unwrap_or(0);
    for (left, right) in &rows {
        line(&mut out, left, width, right);
    }
    if !verb.examples.is_empty() {
        out.push_str("\nExamples:\n");
        for example in verb.examples {
            let _ = writeln!(out, "  {example}"); // a String takes every write
        }
    }
    out
}

fn line(out: &mut String, left: &str, width: usize, right: &str) {
    let _ = writeln!(out, "  {left:<width$}  {}", wrap(right, width + 4)); // a String takes every write
}

/// Breaks lines at words; keeps the newlines that are there.
fn wrap(text: &str, indent: usize) -> String {
    let mut out = String::new();
    for (n, paragraph) in text.split('\n').enumerate() {
        let mut column = indent;
        if n > 0 {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
        }
        for (i, word) in paragraph.split(' ').enumerate() {
            let length = word.chars().count();
            if i > 0 && column + 1 + length > WIDTH {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent));
                column = indent;
            } else if i > 0 {
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += length;
        }
    }
    out
}
