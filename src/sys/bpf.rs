//! Device rules of cgroup v2: a program of type CGROUP_DEVICE, made here instruction by
//! instruction and attached to one directory. bpf(2), Documentation/bpf/instruction-set.
//!
//! Invariant: default deny. The program falls through to "no" after the last rule.
//!
//! We never ask what is attached: kernels from 6.17 up to 7.2 write past the attribute of
//! BPF_PROG_QUERY. And every attribute handed over is larger than any kernel's idea of it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceType {
    Block,
    Char,
}

/// One allowed class of devices and accesses; None matches all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMatch {
    pub kind: Option<DeviceType>,
    pub major: Option<u32>,
    pub minor: Option<u32>,
    pub read: bool,
    pub write: bool,
    pub mknod: bool,
}

/// Loads the rules and attaches them to the cgroup at `dir`. They live as long as it does, and
/// what is attached above or later below must agree too (BPF_F_ALLOW_MULTI): nothing inside can
/// widen them.
pub fn attach_device_filter(dir: &Path, rules: &[DeviceMatch]) -> io::Result<()> {
    let cgroup = File::open(dir)?;
    let program = load(&device_program(rules))?;
    // struct { target_fd, attach_bpf_fd, attach_type, attach_flags }
    let mut attr = Attr::default();
    attr.put32(0, cgroup.as_raw_fd() as u32);
    attr.put32(4, program.as_raw_fd() as u32);
    attr.put32(8, BPF_CGROUP_DEVICE);
    attr.put32(12, BPF_F_ALLOW_MULTI);
    bpf(BPF_PROG_ATTACH, &attr, 16).map(|_| ())
}

const BPF_PROG_LOAD: i32 = 5;
const BPF_PROG_ATTACH: i32 = 8;
const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const BPF_CGROUP_DEVICE: u32 = 6;
const BPF_F_ALLOW_MULTI: u32 = 2;

/// A bpf_attr, larger than the kernel's own union.
#[repr(C, align(8))]
struct Attr([u8; 256]);

impl Default for Attr {
    fn default() -> Attr {
        Attr([0; 256])
    }
}

impl Attr {
    fn put32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
    fn put64(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }
}

fn bpf(command: i32, attr: &Attr, size: u32) -> io::Result<i32> {
    // SAFETY: attr is a valid, zero-padded buffer of 256 bytes, more than any command that we use
    // reads or writes; the pointers inside it outlive the call (see the callers).
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command, attr.0.as_ptr(), size) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc as i32) }
}

fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    let code: Vec<u8> = program.iter().flat_map(|i| i.0).collect();
    let licence = c"Apache-2.0";
    // struct { prog_type, insn_cnt, u64 insns, u64 license, … }
    let mut attr = Attr::default();
    attr.put32(0, BPF_PROG_TYPE_CGROUP_DEVICE);
    attr.put32(4, program.len() as u32);
    attr.put64(8, code.as_ptr() as u64);
    attr.put64(16, licence.as_ptr() as u64);
    let fd = bpf(BPF_PROG_LOAD, &attr, 48)?;
    // SAFETY: the kernel just gave us this descriptor (close-on-exec), and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// One eBPF instruction as the kernel reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction([u8; 8]);

// Opcodes: class | source | operation.
const LOAD_WORD: u8 = 0x61; // dst = *(u32 *)(src + off)
const MOVE: u8 = 0xbf; // dst = src
const MOVE_NUMBER: u8 = 0xb7; // dst = imm
const AND_NUMBER: u8 = 0x57; // dst &= imm
const SHIFT_RIGHT: u8 = 0x77; // dst >>= imm
const IF_NOT_NUMBER: u8 = 0x56; // if (u32)dst != imm goto +off
const IF_NOT: u8 = 0x5d; // if dst != src goto +off
const EXIT: u8 = 0x95;

// From struct bpf_cgroup_dev_ctx { u32 access_type, major, minor }, pointed to by r1 at the start.
const KIND: u8 = 2;
const ACCESS: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;
const MKNOD_BIT: i32 = 1;
const READ_BIT: i32 = 2;
const WRITE_BIT: i32 = 4;

fn ins(opcode: u8, dst: u8, src: u8, offset: i16, number: i32) -> Instruction {
    // The register nibbles follow the host's byte order.
    let registers = if cfg!(target_endian = "little") { src << 4 | dst } else { dst << 4 | src };
    let [o0, o1] = offset.to_ne_bytes();
    let [n0, n1, n2, n3] = number.to_ne_bytes();
    Instruction([opcode, registers, o0, o1, n0, n1, n2, n3])
}

fn device_program(rules: &[DeviceMatch]) -> Vec<Instruction> {
    let mut program = vec![
        ins(LOAD_WORD, KIND, 1, 0, 0),
        ins(MOVE, ACCESS, KIND, 0, 0),
        ins(AND_NUMBER, KIND, 0, 0, 0xffff),
        ins(SHIFT_RIGHT, ACCESS, 0, 0, 16),
        ins(LOAD_WORD, MAJOR, 1, 4, 0),
        ins(LOAD_WORD, MINOR, 1, 8, 0),
    ];
    for rule in rules {
        program.extend(one_rule(rule));
    }
    program.extend([ins(MOVE_NUMBER, 0, 0, 0, 0), ins(EXIT, 0, 0, 0, 0)]);
    program
}

/// "If it matches, yes": every test jumps behind the rule when it fails.
fn one_rule(rule: &DeviceMatch) -> Vec<Instruction> {
    // r1 (the context) is not needed any more; it takes the accesses that the rule allows.
    let mut access = 0;
    for (on, bit) in [(rule.mknod, MKNOD_BIT), (rule.read, READ_BIT), (rule.write, WRITE_BIT)] {
        if on {
            access |= bit;
        }
    }
    let mut code = vec![ins(MOVE, 1, ACCESS, 0, 0), ins(AND_NUMBER, 1, 0, 0, access), ins(IF_NOT, 1, ACCESS, 0, 0)];
    if let Some(kind) = rule.kind {
        let number = match kind {
            DeviceType::Block => 1,
            DeviceType::Char => 2,
        };
        code.push(ins(IF_NOT_NUMBER, KIND, 0, 0, number));
    }
    for (register, number) in [(MAJOR, rule.major), (MINOR, rule.minor)] {
        if let Some(number) = number {
            code.push(ins(IF_NOT_NUMBER, register, 0, 0, number as i32));
        }
    }
    code.extend([ins(MOVE_NUMBER, 0, 0, 0, 1), ins(EXIT, 0, 0, 0, 0)]);
    let end = code.len();
    for (at, instruction) in code.iter_mut().enumerate() {
        if matches!(instruction.0[0], IF_NOT | IF_NOT_NUMBER) {
            // At most 8 instructions: it fits.
            let [o0, o1] = ((end - at - 1) as i16).to_ne_bytes();
            instruction.0[2] = o0;
            instruction.0[3] = o1;
        }
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(kind: Option<DeviceType>, major: Option<u32>, minor: Option<u32>, access: &str) -> DeviceMatch {
        DeviceMatch { kind, major, minor, read: access.contains('r'), write: access.contains('w'), mknod: access.contains('m') }
    }

    /// What the kernel would answer; its own verdict is in tests/cgroup.rs.
    fn run(program: &[Instruction], kind: u32, access: u32, major: u32, minor: u32) -> u64 {
        let context = [access << 16 | kind, major, minor];
        let mut r = [0u64; 11];
        let mut at = 0usize;
        loop {
            let [opcode, registers, o0, o1, n0, n1, n2, n3] = program[at].0;
            let (dst, src) = ((registers & 15) as usize, (registers >> 4) as usize);
            let (offset, number) = (i16::from_ne_bytes([o0, o1]), i32::from_ne_bytes([n0, n1, n2, n3]));
            let mut jump = 0;
            match opcode {
                LOAD_WORD => r[dst] = context[offset as usize / 4].into(),
                MOVE => r[dst] = r[src],
                MOVE_NUMBER => r[dst] = number as u64,
                AND_NUMBER => r[dst] &= number as u64,
                SHIFT_RIGHT => r[dst] >>= number,
                IF_NOT_NUMBER if r[dst] as u32 != number as u32 => jump = offset,
                IF_NOT if r[dst] != r[src] => jump = offset,
                IF_NOT_NUMBER | IF_NOT => {}
                EXIT => return r[0],
                other => panic!("opcode {other:#x}"),
            }
            at += 1 + jump as usize;
        }
    }

    #[test]
    fn what_no_rule_allows_is_denied() {
        let program = device_program(&[
            rule(Some(DeviceType::Char), None, None, "m"),
            rule(Some(DeviceType::Char), Some(1), Some(3), "rwm"),
            rule(Some(DeviceType::Char), Some(136), None, "rw"),
        ]);
        let (r, w, m) = (READ_BIT as u32, WRITE_BIT as u32, MKNOD_BIT as u32);
        for (kind, access, major, minor, answer) in [
            (2, r | w, 1, 3, 1),
            (2, r | w | m, 1, 3, 1),
            (1, r, 1, 3, 0),
            (2, m, 8, 0, 1),
            (1, m, 8, 0, 0),
            (2, r, 8, 0, 0),
            (2, r | w, 136, 77, 1),
            (2, r | m, 136, 77, 0),
            (2, r, u32::MAX, u32::MAX, 0),
        ] {
            assert_eq!(run(&program, kind, access, major, minor), answer, "{kind} {access} {major}:{minor}");
        }
        assert_eq!(run(&device_program(&[]), 2, r, 1, 3), 0);
        assert_eq!(run(&device_program(&[rule(None, None, None, "rwm")]), 1, r | w | m, 8, 1), 1);
    }
}
