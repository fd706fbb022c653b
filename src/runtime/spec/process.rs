//! The process part: argv, environment, user, capabilities, oom_score_adj.

use oci_spec::runtime::{Process, Spec, User};

use super::{SpecError, SpecInput, capabilities};

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const TERM: &str = "TERM=xterm";

pub fn process(input: &SpecInput) -> Result<Process, SpecError> {
    if input.args.first().is_none_or(String::is_empty) {
        return Err(SpecError::Bad {
            field: "command",
            value: input.args.join(" "),
            cure: "give the container a command, or use an image with an entrypoint",
        });
    }
    let cwd = if input.cwd.is_empty() { "/" } else { input.cwd.as_str() };
    if !cwd.starts_with('/') {
        return Err(SpecError::Bad { field: "workingDir", value: cwd.to_owned(), cure: "it must be an absolute path" });
    }
    no_zero("command", &input.args)?;
    let env = env(input)?;

    let mut user = User::default();
    user.set_uid(input.user.uid).set_gid(input.user.gid).set_additional_gids(Some(input.user.groups.clone()));

    let granted = capabilities::granted(&input.capabilities, input.privileged, &input.host.capabilities);
    let mut process = Process::default();
    process
        .set_terminal(Some(input.tty))
        .set_user(user)
        .set_args(Some(input.args.clone()))
        .set_env(Some(env))
        .set_cwd(cwd.into())
        .set_capabilities(Some(capabilities::sets(&granted)))
        .set_rlimits(None)
        .set_no_new_privileges(Some(input.no_new_privileges))
        .set_apparmor_profile(None)
        .set_selinux_label(None)
        // Lower than our own needs CAP_SYS_RESOURCE: clamped where we lack it.
        .set_oom_score_adj(Some(input.oom_score_adj.max(input.host.oom_floor)));
    Ok(process)
}

/// containerd's order: defaults, the image's, the pod's; what comes later replaces in place.
/// HOME, when nobody set it, is what the image's passwd says.
fn env(input: &SpecInput) -> Result<Vec<String>, SpecError> {
    let mut env = vec![PATH.to_owned()];
    if input.tty {
        env.push(TERM.to_owned());
    }
    set(&mut env, format!("HOSTNAME={}", input.hostname));
    for entry in &input.image_env {
        set(&mut env, entry.clone());
    }
    for (key, value) in &input.env {
        if key.is_empty() || key.contains('=') {
            return Err(SpecError::Bad { field: "env.name", value: key.clone(), cure: "it must be non-empty and without =" });
        }
        set(&mut env, format!("{key}={value}"));
    }
    if !env.iter().any(|e| e.starts_with("HOME=")) {
        env.push(format!("HOME={}", if input.user.home.is_empty() { "/" } else { &input.user.home }));
    }
    no_zero("env", &env)?;
    Ok(env)
}

/// Replaces the variable, or appends it. An entry without `=` takes it away, as containerd does.
fn set(env: &mut Vec<String>, entry: String) {
    let key = entry.split('=').next().unwrap_or_default();
    let place = env.iter().position(|e| e.split('=').next() == Some(key));
    match (place, entry.contains('=')) {
        (Some(at), true) => env[at] = entry,
        (Some(at), false) => drop(env.remove(at)),
        (None, true) => env.push(entry),
        (None, false) => {}
    }
}

fn no_zero(field: &'static str, texts: &[String]) -> Result<(), SpecError> {
    match texts.iter().find(|t| t.contains('\0')) {
        Some(text) => {
            Err(SpecError::Bad { field, value: text.replace('\0', "\\0"), cure: "zero bytes cannot be passed to a program" })
        }
        None => Ok(()),
    }
}

pub fn exec(container: &Spec, argv: &[String], tty: bool) -> Result<Process, SpecError> {
    if argv.first().is_none_or(String::is_empty) {
        return Err(SpecError::Bad { field: "command", value: argv.join(" "), cure: "say what to run" });
    }
    no_zero("command", argv)?;
    let Some(mut process) = container.process().clone() else {
        return Err(SpecError::Bad {
            field: "config.json",
            value: "process".into(),
            cure: "it is absent; restart the container",
        });
    };
    process.set_args(Some(argv.to_vec())).set_terminal(Some(tty)).set_console_size(None);
    if tty {
        let mut env = process.env().clone().unwrap_or_default();
        set(&mut env, TERM.to_owned());
        process.set_env(Some(env));
    }
    Ok(process)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input() -> SpecInput {
        SpecInput { args: vec!["sh".into()], hostname: "h".into(), ..SpecInput::default() }
    }

    #[test]
    fn later_environment_replaces_in_place() {
        let input = SpecInput {
            image_env: vec!["A=1".into(), "PATH=/x".into(), "B=2".into(), "TERM".into()],
            env: vec![("B".into(), "3=4".into()), ("C".into(), String::new()), ("C".into(), "5".into())],
            tty: true,
            ..input()
        };
        assert_eq!(env(&input).unwrap(), ["PATH=/x", "HOSTNAME=h", "A=1", "B=3=4", "C=5", "HOME=/"]);
    }

    #[test]
    fn home_comes_from_passwd_unless_set() {
        let mut input = input();
        input.user.home = "/home/app".into();
        assert_eq!(env(&input).unwrap().last().unwrap(), "HOME=/home/app");
        input.image_env.push("HOME=/elsewhere".into());
        assert_eq!(env(&input).unwrap().last().unwrap(), "HOME=/elsewhere");
    }

    #[test]
    fn nonsense_is_refused_with_its_field() {
        for (input, field) in [
            (SpecInput { args: Vec::new(), ..input() }, "command"),
            (SpecInput { args: vec![String::new()], ..input() }, "command"),
            (SpecInput { args: vec!["a\0b".into()], ..input() }, "command"),
            (SpecInput { cwd: "x/y".into(), ..input() }, "workingDir"),
            (SpecInput { env: vec![("A=B".into(), String::new())], ..input() }, "env.name"),
            (SpecInput { env: vec![("A".into(), "\0".into())], ..input() }, "env"),
        ] {
            let SpecError::Bad { field: told, .. } = process(&input).unwrap_err();
            assert_eq!(told, field);
        }
    }

    #[test]
    fn oom_score_adj_never_goes_below_what_we_may_set() {
        let mut input = SpecInput { oom_score_adj: -997, ..input() };
        input.host.oom_floor = -1000;
        assert_eq!(process(&input).unwrap().oom_score_adj(), Some(-997));
        input.host.oom_floor = 0;
        assert_eq!(process(&input).unwrap().oom_score_adj(), Some(0));
    }

    #[test]
    fn exec_is_the_container_with_another_argv() {
        let mut input = input();
        input.user.uid = 7;
        input.image_env.push("TERM=screen".into());
        let spec = super::super::container_spec(&input).unwrap();
        let plain = exec(&spec, &["id".into()], false).unwrap();
        let first = spec.process().as_ref().unwrap();
        assert_eq!(plain.user(), first.user());
        assert_eq!(plain.env(), first.env());
        assert_eq!(plain.args().as_deref(), Some(["id".to_owned()].as_slice()));
        let with_tty = exec(&spec, &["sh".into()], true).unwrap();
        assert_eq!(with_tty.terminal(), Some(true));
        assert!(with_tty.env().as_ref().unwrap().contains(&"TERM=xterm".to_owned()));
        assert!(exec(&spec, &[], false).is_err());
    }
}
