//! The kubelet's directory as a shared mount: what is mounted in a volume by the node or by a pod
//! with Bidirectional propagation has peers to go to. systemd shares `/` at boot; other inits, and
//! containers that a node runs in, leave it private. As the kubelet's MakeRShared.
//!
//! Invariant: the mount stands in the effects journal before it is made, and it never hides mounts
//! of pods that live: then the directory stays as it is. mount_namespaces(7), "Shared subtrees".

use super::*;

pub(super) fn share(kubelet: &Path, effects: &Effects) -> Result<(), VolumeError> {
    let failed = |operation| VolumeError::system(operation, kubelet);
    let on = mount_table::of(kubelet).map_err(failed("look up"))?;
    let Some(on) = on.filter(|on| !on.shared) else { return Ok(()) };
    let effect = Effect::Mount { target: kubelet.to_owned() };
    let ours = on.target == kubelet && effects.standing()?.iter().any(|standing| standing.effect == effect);
    if !ours {
        let below = mount_table::below(kubelet).map_err(failed("look up"))?;
        if below.iter().any(|mount| mount != kubelet) {
            tracing::warn!(
                dir = %kubelet.display(),
                "volumes lie on a private mount and pods use them, so it is left alone: mountPropagation of their volumes \
                 works once no pod has a volume here, or after the next reboot"
            );
            return Ok(());
        }
        effects.intent(&effect)?;
        mount(Some(kubelet), kubelet, None::<&str>, MsFlags::MS_BIND, None::<&str>).map_err(|e| failed("bind")(e.into()))?;
        failpoint::hit("volumes.share.bind").map_err(failed("bind"))?;
    }
    mount(None::<&str>, kubelet, None::<&str>, MsFlags::MS_SHARED, None::<&str>).map_err(|e| failed("share")(e.into()))?;
    Ok(effects.done(&effect)?)
}
