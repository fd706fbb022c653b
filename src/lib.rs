/// Uses the runtime, so that it is linked.
pub fn probe() -> bool {
    libcontainer::container::Container::load(std::env::temp_dir()).is_ok()
        && libcontainer::container::builder::ContainerBuilder::new(
            "probe".to_owned(),
            libcontainer::syscall::syscall::SyscallType::default(),
        )
        .with_root_path("/run")
        .map(|b| b.as_init("/tmp").build().is_ok())
        .unwrap_or(false)
}
