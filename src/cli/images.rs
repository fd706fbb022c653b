//! `coracle images`, `coracle pull`, `coracle import`: the images of this node.

use super::args::{Body, Flag, Given, INSTANCE, NO_OPERANDS, OUTPUT, Operands, Output, ROOT, Verb};
use super::client::{Answers, Client};
use super::exit::{CliError, Exit};
use super::{print, table};
use crate::kubelet::server::model::{Answer, Ask, ImageView};

const USER: Flag = Flag {
    long: "user",
    short: Some('u'),
    value: Some("NAME"),
    help: "log in at the registry as NAME; the password is read from the file of --password-file, or from CORACLE_PASSWORD",
};
const PASSWORD_FILE: Flag =
    Flag { long: "password-file", short: None, value: Some("FILE"), help: "its first line is the password for --user" };
const NAME: Flag =
    Flag { long: "name", short: None, value: Some("REFERENCE"), help: "name for the archive's only image, instead of its own" };

pub const IMAGES: Verb = Verb {
    name: "images",
    operands: NO_OPERANDS,
    command: false,
    summary: "list the images of this node",
    about: "Lists images that are whole on this node: every layer was checked, unpacked and recorded. SIZE is what was \
            downloaded; a pinned image is never collected.",
    flags: &[&OUTPUT, &ROOT, &INSTANCE],
    examples: &["coracle images", "coracle images -o json"],
    body: Body::Parsed(images),
};

pub const PULL: Verb = Verb {
    name: "pull",
    operands: Operands { text: "IMAGE", min: 1, max: 1 },
    command: false,
    summary: "fetch an image from its registry",
    about: "Fetches what is missing of an image and unpacks it. Pods that wait for the image go on at once.",
    flags: &[&USER, &PASSWORD_FILE, &OUTPUT, &ROOT, &INSTANCE],
    examples: &[
        "coracle pull busybox:1.36",
        "coracle pull -u me --password-file /etc/registry.pw registry.example:5000/team/app:7",
    ],
    body: Body::Parsed(pull),
};

pub const IMPORT: Verb = Verb {
    name: "import",
    operands: Operands { text: "PATH", min: 1, max: 1 },
    command: false,
    summary: "take in images from an OCI layout or a docker archive",
    about: "Takes in every image of an OCI layout (directory or tar) or of a `docker save` archive, gzipped or not, and pins \
            them. PATH is a path on this host.",
    flags: &[&NAME, &OUTPUT, &ROOT, &INSTANCE],
    examples: &["coracle import app.tar.gz", "coracle import --name example.com/app:7 oci-layout/"],
    body: Body::Parsed(import),
};

fn images(given: &Given) -> Result<Exit, CliError> {
    let answers = Client::connect(&given.roots()?)?.ask(Ask::Images {})?;
    show(answers, given.output()?)
}

fn pull(given: &Given) -> Result<Exit, CliError> {
    let output = given.output()?;
    let reference = given.operand(0)?.unwrap_or_default().to_owned();
    let username = given.text(&USER)?.unwrap_or_default().to_owned();
    let password = match (username.is_empty(), given.path(&PASSWORD_FILE)) {
        (true, None) => String::new(),
        (true, Some(_)) => return Err(CliError::Usage("--password-file needs --user".into())),
        (false, Some(path)) => {
            let text = std::fs::read_to_string(path).map_err(CliError::io("read", path))?;
            text.lines().next().unwrap_or_default().to_owned()
        }
        (false, None) => std::env::var("CORACLE_PASSWORD")
            .map_err(|e| CliError::because("--user needs --password-file or CORACLE_PASSWORD in the environment", e))?,
    };
    show(Client::connect(&given.roots()?)?.ask(Ask::Pull { reference, username, password })?, output)
}

fn import(given: &Given) -> Result<Exit, CliError> {
    let output = given.output()?;
    let operand = given.operand(0)?.unwrap_or_default();
    // The agent has another working directory.
    let path = std::fs::canonicalize(operand).map_err(CliError::io("find", operand))?;
    let path = path.to_str().ok_or_else(|| CliError::Usage(format!("{}: not UTF-8", path.display())))?.to_owned();
    let name = given.text(&NAME)?.map(str::to_owned);
    show(Client::connect(&given.roots()?)?.ask(Ask::Import { path, name })?, output)
}

fn show(mut answers: Answers, output: Output) -> Result<Exit, CliError> {
    let mut images = Vec::new();
    while let Some(answer) = answers.next()? {
        match answer {
            // An archive names one image many times.
            Answer::Image(image) if !images.contains(&image) => images.push(image),
            Answer::Said { text } => eprintln!("{}", table::clean(&text)),
            // A newer agent may tell more than was asked for.
            _ => {}
        }
    }
    match output {
        Output::Json => print(&format!("{}\n", serde_json::to_string_pretty(&images).map_err(CliError::Answer)?))?,
        Output::Table | Output::Wide => print(&text(&images, output == Output::Wide))?,
    }
    Ok(Exit::Ok)
}

/// One row a name; an image without one still has its row.
fn text(images: &[ImageView], wide: bool) -> String {
    if images.is_empty() {
        return "no images\n".to_owned();
    }
    let mut rows = Vec::new();
    for image in images {
        let none = [String::new()];
        let names = if image.tags.is_empty() { &none[..] } else { &image.tags };
        for name in names {
            let (name, tag) = split_tag(name);
            let digest = image.digests.first().and_then(|d| d.split_once('@')).map_or("", |(_, digest)| digest);
            let short = |text: &str| text.trim_start_matches("sha256:").chars().take(12).collect::<String>();
            let (id, digest) = if wide { (image.id.clone(), digest.to_owned()) } else { (short(&image.id), short(digest)) };
            let pinned = if image.pinned { "yes" } else { "no" };
            rows.push(vec![name.to_owned(), tag.to_owned(), id, digest, table::bytes(image.size), pinned.to_owned()]);
        }
    }
    table::render(&["IMAGE", "TAG", "ID", "DIGEST", "SIZE", "PINNED"], &rows)
}

/// `docker.io/library/busybox:1.36` at its tag; a port is no tag.
fn split_tag(name: &str) -> (&str, &str) {
    match name.rsplit_once(':') {
        Some((image, tag)) if !tag.contains('/') => (image, tag),
        _ => (name, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_a_name() {
        let image = ImageView {
            id: format!("sha256:{}", "ab".repeat(32)),
            tags: vec!["docker.io/library/busybox:1.36".into(), "localhost:5000/b".into()],
            digests: vec![format!("docker.io/library/busybox@sha256:{}", "cd".repeat(32))],
            size: 2_150_000,
            pinned: true,
        };
        assert_eq!(
            text(&[image], false),
            "IMAGE                      TAG     ID            DIGEST        SIZE   PINNED\n\
             docker.io/library/busybox  1.36    abababababab  cdcdcdcdcdcd  2.1MB  yes\n\
             localhost:5000/b           <none>  abababababab  cdcdcdcdcdcd  2.1MB  yes\n"
        );
    }
}
