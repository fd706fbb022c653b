//! hostPath: a path of the node, checked or made as its type says. The operator wrote it, so its
//! links are followed. kubernetes/pkg/volume/hostpath.

use std::fs::{self, DirBuilder, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Makes sure that `path` is what `kind` asks for. The error is the kubelet's word.
pub fn check(path: &Path, kind: &str) -> Result<(), String> {
    let found = match fs::metadata(path) {
        Ok(meta) => Some(meta.file_type()),
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound) => None,
        Err(e) => return Err(format!("hostPath {}: {e}", path.display())),
    };
    let wanted = |what: &str, fits: fn(&FileType) -> bool| match &found {
        Some(kind) if fits(kind) => Ok(()),
        _ => Err(format!("hostPath type check failed: {} is not a {what}", path.display())),
    };
    match kind {
        // Whatever stands there; the container runtime makes a directory of nothing.
        "" if found.is_some() => Ok(()),
        "" | "DirectoryOrCreate" if found.is_none() => make_dir(path),
        "Directory" | "DirectoryOrCreate" => wanted("directory", FileType::is_dir),
        "FileOrCreate" if found.is_none() => make_file(path),
        "File" | "FileOrCreate" => wanted("file", FileType::is_file),
        "Socket" => wanted("socket file", FileType::is_socket),
        "CharDevice" => wanted("character device", FileType::is_char_device),
        "BlockDevice" => wanted("block device", FileType::is_block_device),
        other => Err(format!("\"{other}\" is no hostPath type")),
    }
}

fn make_dir(path: &Path) -> Result<(), String> {
    let made = DirBuilder::new().recursive(true).mode(0o755).create(path);
    made.map_err(|e| format!("hostPath {} cannot be made: {e}", path.display()))
}

/// Its directory must be there: the kubelet makes none.
fn make_file(path: &Path) -> Result<(), String> {
    let made = OpenOptions::new().write(true).create(true).truncate(false).mode(0o644).open(path);
    made.and_then(|file| file.set_permissions(fs::Permissions::from_mode(0o644)))
        .map_err(|e| format!("hostPath {} cannot be made: {e}", path.display()))
}
