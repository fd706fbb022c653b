//! Arguments to one command; the only exit; prints an error's whole chain once.

fn main() {
    std::process::exit(coracle::cli::run(std::env::args_os().collect()));
}
