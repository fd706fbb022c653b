//! What every test needs: a kubelet root, a journal, objects, and mounts that nobody else sees.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle::api::pod::{Container, Pod};
use coracle::api::yaml::{Limits, documents};
use coracle::store::effects::{Effect, Effects};
use coracle::store::ids::PodUid;
use coracle::sys::mount_table;
use coracle::volumes::Volumes;
use coracle::volumes::model::{Contents, Data, MountPlan, VolumeError};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// Runs `test` in a thread whose mounts are its own and go with it.
pub fn in_own_mounts(test: impl FnOnce() + Send + 'static) {
    if !nix::unistd::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "volume tests need root");
        eprintln!("SKIP: volume tests need root");
        return;
    }
    let run = move || {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        test();
    };
    // The stacks of the agent's own threads are this small.
    let thread = std::thread::Builder::new().stack_size(256 << 10).spawn(run).unwrap();
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

#[derive(Default)]
pub struct Objects {
    maps: BTreeMap<String, Data>,
    secrets: BTreeMap<String, Data>,
}

impl Contents for Objects {
    fn config_map(&self, namespace: &str, name: &str) -> Option<&Data> {
        self.maps.get(name).filter(|_| namespace == "ns")
    }
    fn secret(&self, namespace: &str, name: &str) -> Option<&Data> {
        self.secrets.get(name).filter(|_| namespace == "ns")
    }
}

fn data(pairs: &[(&str, &str)]) -> Data {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), v.as_bytes().to_vec())).collect()
}

pub struct World {
    pub root: PathBuf,
    pub volumes: Volumes,
    pub effects: Arc<Effects>,
    pub objects: Objects,
    pub uid: PodUid,
}

impl World {
    pub fn at(root: &Path) -> World {
        let root = fs::canonicalize(root).unwrap();
        fs::create_dir_all(root.join("run")).unwrap();
        let (effects, _) = Effects::open(&root.join("run"), "boot").unwrap();
        let effects = Arc::new(effects);
        let volumes = Volumes::open(&root.join("kubelet"), Arc::clone(&effects)).unwrap();
        World { root, volumes, effects, objects: Objects::default(), uid: PodUid::parse("0123abcd").unwrap() }
    }

    pub fn map(&mut self, name: &str, pairs: &[(&str, &str)]) {
        self.objects.maps.insert(name.to_owned(), data(pairs));
    }

    pub fn secret(&mut self, name: &str, pairs: &[(&str, &str)]) {
        self.objects.secrets.insert(name.to_owned(), data(pairs));
    }

    pub fn setup(&self, pod: &Pod) -> Result<(), VolumeError> {
        self.volumes.setup(&self.uid, pod, &self.objects)
    }

    pub fn mounts(&self, pod: &Pod) -> Result<Vec<MountPlan>, VolumeError> {
        self.volumes.mounts(&self.uid, pod, &pod.spec.containers[0])
    }

    pub fn teardown(&self) {
        self.volumes.teardown(&self.uid).unwrap();
        let dir = self.dir();
        assert!(fs::symlink_metadata(&dir).is_err(), "{} is still there", dir.display());
        assert_eq!(mount_table::below(&dir).unwrap(), [] as [PathBuf; 0]);
        assert_eq!(self.standing(), []);
    }

    /// The pod's directory.
    pub fn dir(&self) -> PathBuf {
        self.root.join("kubelet/pods").join(self.uid.as_str())
    }

    pub fn volume(&self, kind: &str, name: &str) -> PathBuf {
        self.dir().join(format!("volumes/kubernetes.io~{kind}")).join(name)
    }

    pub fn standing(&self) -> Vec<Effect> {
        self.effects.standing().unwrap().into_iter().map(|s| s.effect).collect()
    }
}

/// A pod of namespace `ns` with these `spec` fields and one container `c`.
pub fn pod(volumes: &str, mounts: &str) -> Pod {
    pod_with("", volumes, mounts)
}

pub fn pod_with(spec: &str, volumes: &str, mounts: &str) -> Pod {
    let text = format!(
        "metadata: {{name: p, namespace: ns}}\nspec: {{{spec} volumes: [{volumes}], containers: [{{name: c, image: i, volumeMounts: [{mounts}]}}]}}"
    );
    let tree = documents(text.as_bytes(), Limits::default()).next().unwrap().unwrap();
    let (pod, unknown) = tree.read::<Pod>().unwrap();
    assert!(unknown.is_empty(), "{unknown:?}");
    pod
}

pub fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

pub fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path.as_ref()).unwrap_or_else(|e| panic!("{}: {e}", path.as_ref().display()))
}

/// Every name below `dir` with inode and change time: equal where nothing was written.
pub fn snapshot(dir: &Path) -> BTreeMap<PathBuf, (u64, i64, i64)> {
    let mut found = BTreeMap::new();
    let mut open = vec![dir.to_owned()];
    while let Some(path) = open.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            open.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
        found.insert(path, (meta.ino(), meta.ctime(), meta.ctime_nsec()));
    }
    found
}

/// The only container, for calls that want one.
pub fn container(pod: &Pod) -> &Container {
    &pod.spec.containers[0]
}
