//! The `k3` command. All of it is in the library, see there.

fn main() -> std::process::ExitCode {
    k3_bin::main()
}
