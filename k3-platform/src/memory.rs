//! What the machine has to give: memory and processors, as this process may use them.
//!
//! Everything is read from `/proc` and `/sys`, below a root that tests replace. All limits that can end
//! a run are asked, and the smallest wins: the machine's free memory, every control group (version 1
//! or 2) from this process's own up to the one that is mounted, and the limits of the process.
//! Whatever cannot be read sets no limit.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Address space that a thread takes: its stack, and what the C library sets aside for its allocations,
/// most of which is never touched (bytes).
const SPACE_OF_THREAD: u64 = 68 << 20;

/// What of it counts as data: the stack, and the first piece of the rest (bytes).
const DATA_OF_THREAD: u64 = 3 << 20;

/// Bytes that can still be allocated, and what allows no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Availability {
    /// Bytes beyond what the process uses now.
    pub bytes: u64,
    /// What sets the limit.
    pub limit: Limit,
}

/// What limits memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// Memory that the machine can free without swapping (`MemAvailable`).
    Machine,
    /// A control group, by its path as `/proc/self/cgroup` would give it.
    Cgroup(PathBuf),
    /// The size of the address space (`RLIMIT_AS`, `ulimit -v`).
    AddressSpace,
    /// The size of private memory (`RLIMIT_DATA`, `ulimit -d`).
    Data,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Machine => f.write_str("the machine's available memory"),
            Self::Cgroup(path) => write!(f, "the memory limit of control group {}", path.display()),
            Self::AddressSpace => f.write_str("the limit on the address space (ulimit -v)"),
            Self::Data => f.write_str("the limit on private memory (ulimit -d)"),
        }
    }
}

/// Memory this process can still allocate if it starts so many threads; `None` if nothing says so, as
/// without `/proc`.
#[must_use]
pub fn available(threads: usize) -> Option<Availability> {
    Machine::this().available(threads)
}

/// Memory this process could allocate at most, whatever else were given up for it: all that is cached of
/// files, and what fits on the swap device. Whoever takes more is killed. `None` if nothing says so.
#[must_use]
pub fn obtainable() -> Option<Availability> {
    Machine::this().obtainable()
}

/// Resident memory of this process now, in bytes; `None` if the system does not say.
#[must_use]
pub fn rss() -> Option<u64> {
    Machine::this().rss()
}

/// The most memory this process ever had resident, in bytes; `None` if the system does not say. The
/// counter that `getrusage` reports, except that it starts anew with the program.
#[must_use]
pub fn peak_rss() -> Option<u64> {
    Machine::this().peak_rss()
}

/// Threads that compute without disturbing each other: physical cores this process may run on, no
/// more than its control groups' processor time; at least one.
#[must_use]
pub fn default_threads() -> usize {
    Machine::this().default_threads()
}

/// A machine, as seen through `/proc` and `/sys`.
#[derive(Debug, Clone)]
pub struct Machine {
    root: PathBuf,
}

impl Machine {
    /// This one.
    #[must_use]
    pub fn this() -> Self {
        Self::under(Path::new("/"))
    }

    /// One whose `/proc` and `/sys` lie below `root`: a test's.
    #[must_use]
    pub fn under(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// As [`available`].
    #[must_use]
    pub fn available(&self, threads: usize) -> Option<Availability> {
        let machine = kilobytes(&self.read("proc/meminfo"), "MemAvailable");
        self.smallest(machine, &self.groups("memory"), &["inactive_file"], 0, threads)
    }

    /// As [`obtainable`].
    #[must_use]
    pub fn obtainable(&self) -> Option<Availability> {
        let info = self.read("proc/meminfo");
        let groups = self.groups("memory");
        // What this process may not swap gives room to nobody, whichever of its groups says so.
        let swap =
            kilobytes(&info, "SwapFree").into_iter().chain(groups.iter().filter_map(swap_left)).min().unwrap_or(0);
        // What this file system caches is not in MemAvailable, though it is given up in the same way.
        let zfs = self.read("proc/spl/kstat/zfs/arcstats");
        let cached = |name| zfs.lines().find_map(|l| l.strip_prefix(name)?.split_whitespace().nth(1)?.parse().ok());
        let cached = cached("size ").unwrap_or(0u64).saturating_sub(cached("c_min ").unwrap_or(0));
        let machine = kilobytes(&info, "MemAvailable").map(|bytes| bytes.saturating_add(swap).saturating_add(cached));
        self.smallest(machine, &groups, &["inactive_file", "active_file"], swap, 0)
    }

    /// The smallest of all limits: what the machine has, what control groups leave if they give up what is
    /// `cached` and use `swap`, and what the process may map besides its `threads`.
    fn smallest(
        &self,
        machine: Option<u64>,
        groups: &[Group],
        cached: &[&str],
        swap: u64,
        threads: usize,
    ) -> Option<Availability> {
        let machine = machine.map(|bytes| (bytes, Limit::Machine));
        let status = self.read("proc/self/status");
        let limits = self.read("proc/self/limits");
        let process = [
            ("Max address space", "VmSize", SPACE_OF_THREAD, Limit::AddressSpace),
            ("Max data size", "VmData", DATA_OF_THREAD, Limit::Data),
        ];
        let process = process.into_iter().filter_map(|(name, used, of_thread, limit)| {
            let soft = limits.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next());
            let most: u64 = soft?.parse().ok()?;
            let used = kilobytes(&status, used).unwrap_or(0).saturating_add(of_thread.saturating_mul(threads as u64));
            Some((most.saturating_sub(used), limit))
        });
        let groups = groups.iter().filter_map(|group| {
            let bytes = if group.unified {
                free_unified(&group.dir, cached).map(|bytes| bytes.saturating_add(swap))
            } else {
                let memory = free_legacy(&group.dir, "memory", cached).map(|bytes| bytes.saturating_add(swap));
                let both = free_legacy(&group.dir, "memory.memsw", cached);
                memory.into_iter().chain(both).min()
            };
            Some((bytes?, Limit::Cgroup(group.path.clone())))
        });
        // Among equals the first, and the machine is named before what only repeats it.
        let all = machine.into_iter().chain(groups).chain(process);
        let (bytes, limit) = all.min_by_key(|(bytes, _)| *bytes)?;
        Some(Availability { bytes, limit })
    }

    /// As [`rss`].
    #[must_use]
    pub fn rss(&self) -> Option<u64> {
        kilobytes(&self.read("proc/self/status"), "VmRSS")
    }

    /// As [`peak_rss`].
    #[must_use]
    pub fn peak_rss(&self) -> Option<u64> {
        kilobytes(&self.read("proc/self/status"), "VmHWM")
    }

    /// What the processor is called; `None` if the system does not say.
    #[must_use]
    pub fn processor(&self) -> Option<String> {
        let text = self.read("proc/cpuinfo");
        let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'))?.1.trim().to_owned();
        (!name.is_empty()).then_some(name)
    }

    /// Processors (threads of cores) in the affinity mask; `None` if nothing says.
    #[must_use]
    pub fn processors(&self) -> Option<usize> {
        self.allowed().map(|list| list.len())
    }

    /// The processors in the affinity mask.
    fn allowed(&self) -> Option<Vec<u32>> {
        let status = self.read("proc/self/status");
        cpu_list(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim())
    }

    /// Whole processors whose time the control groups allow; `None` if there is no quota.
    #[must_use]
    pub fn quota(&self) -> Option<usize> {
        self.groups("cpu").iter().filter_map(processor_time).min()
    }

    /// When the system backs memory with huge pages: `always`, `madvise` or `never`.
    #[must_use]
    pub fn huge_pages(&self) -> Option<String> {
        let text = self.read("sys/kernel/mm/transparent_hugepage/enabled");
        Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
    }

    /// As [`default_threads`].
    #[must_use]
    pub fn default_threads(&self) -> usize {
        self.cores().min(self.quota().unwrap_or(usize::MAX)).max(1)
    }

    /// Physical cores with at least one processor in the affinity mask; zero if nothing says.
    fn cores(&self) -> usize {
        let Some(allowed) = self.allowed() else { return 0 };
        let core = |cpu: u32| {
            let topology = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            // The processors of a core all show the same list; the second name is the older one.
            ["core_cpus_list", "thread_siblings_list"]
                .iter()
                .map(|name| self.read(&format!("{topology}/{name}")).trim().to_owned())
                .find(|list| !list.is_empty())
                .unwrap_or_else(|| cpu.to_string())
        };
        allowed.into_iter().map(core).collect::<BTreeSet<_>>().len()
    }

    /// Every control group with this controller that holds this process, inner ones first.
    fn groups(&self, controller: &str) -> Vec<Group> {
        let (cgroup, mounts) = (self.read("proc/self/cgroup"), self.read("proc/self/mountinfo"));
        let mut groups = Vec::new();
        for line in cgroup.lines() {
            // "4:memory,cpu:/path", or "0::/path" for version 2.
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            let unified = controllers.is_empty();
            if !unified && !controllers.split(',').any(|name| name == controller) {
                continue;
            }
            for mount in mounts.lines().filter_map(Mount::parse) {
                let here = match mount.kind {
                    "cgroup2" => unified,
                    "cgroup" => !unified && mount.options.split(',').any(|name| name == controller),
                    _ => false,
                };
                if here {
                    self.climb(&mount, Path::new(path), unified, &mut groups);
                }
            }
        }
        groups
    }

    /// The group at `path` of the mounted hierarchy and all around it, as far as they can be seen.
    fn climb(&self, mount: &Mount<'_>, path: &Path, unified: bool, groups: &mut Vec<Group>) {
        let base = self.root.join(mount.point.strip_prefix("/").unwrap_or(&mount.point));
        // In a container the mount may show only a part of the tree, or the path may lead out of it.
        let plain = |path: &Path| path.components().all(|c| matches!(c, Component::Normal(_)));
        let inner = path.strip_prefix(&mount.root).ok().filter(|inner| plain(inner));
        let inner = inner.filter(|inner| base.join(inner).is_dir()).unwrap_or(Path::new(""));
        for inner in inner.ancestors() {
            groups.push(Group { dir: base.join(inner), path: mount.root.join(inner), unified });
        }
    }

    /// A file's text, or nothing.
    fn read(&self, path: &str) -> String {
        text(&self.root.join(path))
    }
}

/// A directory of the control group file system.
struct Group {
    dir: PathBuf,
    path: PathBuf,
    unified: bool,
}

/// A line of mountinfo.
struct Mount<'a> {
    /// What part of the mounted tree is visible.
    root: PathBuf,
    /// Where.
    point: PathBuf,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        // "31 23 0:28 /root /point options [optional fields] - kind source options"
        let (left, right) = line.split_once(" - ")?;
        let (mut left, mut right) = (left.split(' ').skip(3), right.split(' '));
        let (root, point) = (unescape(left.next()?), unescape(left.next()?));
        let (kind, _source) = (right.next()?, right.next()?);
        Some(Self { root, point, kind, options: right.next().unwrap_or("") })
    }
}

/// Undoes mountinfo's writing of blanks and backslashes as three octal digits.
fn unescape(text: &str) -> PathBuf {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or("").to_owned();
    for part in parts {
        let byte = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()).filter(u8::is_ascii);
        match byte {
            Some(byte) => {
                plain.push(char::from(byte));
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain.into()
}

fn text(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// The number a file holds; `None` if it holds none, as the word `max`.
fn number<N: std::str::FromStr>(path: &Path) -> Option<N> {
    text(path).trim().parse().ok()
}

/// The bytes of a line "name:   123 kB".
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The number of a line "name 123".
fn statistic(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?.trim().parse().ok()
}

/// Bytes left in a version 2 group that gives up these kinds of cached file pages. Above `memory.high` a
/// group is slowed down so far that it is a limit as well.
fn free_unified(dir: &Path, cached: &[&str]) -> Option<u64> {
    let most = ["memory.max", "memory.high"].iter().filter_map(|name| number::<u64>(&dir.join(name))).min()?;
    let used: u64 = number(&dir.join("memory.current"))?;
    let stat = text(&dir.join("memory.stat"));
    let cached = cached.iter().filter_map(|name| statistic(&stat, name)).fold(0, u64::saturating_add);
    Some(most.saturating_sub(used.saturating_sub(cached)))
}

/// Bytes that a version 2 group may still swap; `None` if it may as much as there is. Above `memory.swap.high` it is
/// slowed down, as above `memory.high`. (A version 1 group has a limit on memory and swap together.)
fn swap_left(group: &Group) -> Option<u64> {
    let limit = |name: &&str| number::<u64>(&group.dir.join(name));
    let most = ["memory.swap.max", "memory.swap.high"].iter().filter_map(limit).min().filter(|_| group.unified)?;
    Some(most.saturating_sub(number(&group.dir.join("memory.swap.current")).unwrap_or(0)))
}

/// Bytes left in a version 1 group, likewise: of `memory`, or of memory and swap together (`memory.memsw`).
fn free_legacy(dir: &Path, what: &str, cached: &[&str]) -> Option<u64> {
    let most: u64 = number(&dir.join(format!("{what}.limit_in_bytes")))?;
    let used: u64 = number(&dir.join(format!("{what}.usage_in_bytes")))?;
    let stat = text(&dir.join("memory.stat"));
    let cached = cached.iter().filter_map(|name| statistic(&stat, &format!("total_{name}")));
    Some(most.saturating_sub(used.saturating_sub(cached.fold(0, u64::saturating_add))))
}

/// Whole processors whose time a group may use, at least one; `None` if it has no quota.
fn processor_time(group: &Group) -> Option<usize> {
    let (quota, period): (u64, u64) = if group.unified {
        let line = text(&group.dir.join("cpu.max"));
        let (quota, period) = line.trim().split_once(' ')?;
        (quota.parse().ok()?, period.parse().ok()?)
    } else {
        // No quota is written as -1, which is no u64.
        (number(&group.dir.join("cpu.cfs_quota_us"))?, number(&group.dir.join("cpu.cfs_period_us"))?)
    };
    // A thread more than there is time for would only be stopped while the others wait for it.
    Some(usize::try_from(quota.checked_div(period)?).unwrap_or(usize::MAX).max(1))
}

/// The numbers of a list such as "0-3,8"; `None` if it is no such list, or one nobody means.
fn cpu_list(list: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in list.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last > u32::from(u16::MAX) {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aligned::AlignedBuf;

    const GB: u64 = 1_000_000_000;
    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 99999999 kB\nMemAvailable:   8000000 kB\n");
    const MEMORY: u64 = 8_000_000 * 1024;

    /// A machine made of these files.
    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let machine = Machine::under(dir.path());
        (dir, machine)
    }

    fn smallest(files: &[(&str, &str)]) -> (u64, Limit) {
        let (_dir, machine) = machine(files);
        let Availability { bytes, limit } = machine.available(0).unwrap();
        (bytes, limit)
    }

    #[test]
    fn no_files_are_no_limits() {
        let (_dir, machine) = machine(&[]);
        assert_eq!((machine.available(0), machine.rss(), machine.peak_rss()), (None, None, None));
        assert_eq!(machine.default_threads(), 1);
        assert_eq!(smallest(&[MEMINFO]), (MEMORY, Limit::Machine));
    }

    #[test]
    fn unified_groups_are_searched_to_the_top() {
        let base = [
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.high", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "1000\n"),
            ("sys/fs/cgroup/a/memory.current", "3000000000\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 1000000000\nactive_file 7\n"),
        ];
        assert_eq!(smallest(&base), (MEMORY, Limit::Machine));
        let with = |more: &[(&'static str, &'static str)]| smallest(&[&base, more].concat());
        let outer = ("sys/fs/cgroup/a/memory.max", "5000000000\n");
        assert_eq!(with(&[outer]), (3 * GB, Limit::Cgroup("/a".into())));
        // Inner limits win when they are smaller, used up is zero, and high counts like max.
        assert_eq!(
            with(&[outer, ("sys/fs/cgroup/a/b/memory.max", "2000001000")]),
            (2 * GB, Limit::Cgroup("/a/b".into()))
        );
        assert_eq!(with(&[outer, ("sys/fs/cgroup/a/memory.high", "2500000000")]), (GB / 2, Limit::Cgroup("/a".into())));
        assert_eq!(with(&[("sys/fs/cgroup/a/memory.max", "1")]).0, 0);
    }

    #[test]
    fn legacy_groups_count_too() {
        let base = [
            MEMINFO,
            ("proc/self/cgroup", "5:cpuset:/\n4:cpu,memory:/x/y\n0::/\n"),
            (
                "proc/self/mountinfo",
                "1 2 0:1 / / rw - ext4 /dev/a rw\n35 31 0:32 / /cg/my\\040memory rw - cgroup cgroup rw,memory,cpu\n",
            ),
            ("cg/my memory/memory.limit_in_bytes", "9223372036854771712"),
            ("cg/my memory/memory.usage_in_bytes", "123456"),
            ("cg/my memory/x/memory.limit_in_bytes", "4000000000"),
            ("cg/my memory/x/memory.usage_in_bytes", "2000000000"),
            ("cg/my memory/x/memory.stat", "inactive_file 9\ntotal_inactive_file 500000000\n"),
            ("cg/my memory/x/y/memory.limit_in_bytes", "9223372036854771712"),
            ("cg/my memory/x/y/memory.usage_in_bytes", "0"),
        ];
        assert_eq!(smallest(&base), (2 * GB + GB / 2, Limit::Cgroup("/x".into())));
    }

    /// What is cached of files can be given up, all of it, and swap can be used.
    #[test]
    fn more_can_be_had_than_is_free() {
        let had = |files: &[(&str, &str)]| {
            let (_dir, machine) = machine(files);
            machine.obtainable().map(|a| (a.bytes, a.limit))
        };
        assert_eq!(had(&[]), None);
        assert_eq!(had(&[MEMINFO]), Some((MEMORY, Limit::Machine)));
        let swap = ("proc/meminfo", "MemAvailable: 8000000 kB\nSwapFree: 1000 kB\n");
        assert_eq!(had(&[swap]), Some((MEMORY + 1_024_000, Limit::Machine)));
        let zfs = ("proc/spl/kstat/zfs/arcstats", "c_min 4 500\nc_max 4 9\nsize 4 4500\ndata_size 4 1\n");
        assert_eq!(had(&[MEMINFO, zfs]), Some((MEMORY + 4000, Limit::Machine)));
        let unified = [
            ("proc/self/cgroup", "0::/a\n"),
            ("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/a/memory.max", "5000000000\n"),
            ("sys/fs/cgroup/a/memory.current", "3000000000\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 1000000000\nactive_file 500000000\n"),
        ];
        let group = || Limit::Cgroup("/a".into());
        let with = |info| had(&[&unified[..], &[info]].concat());
        assert_eq!(with(MEMINFO), Some((3 * GB + GB / 2, group())));
        assert_eq!(with(swap), Some((3 * GB + GB / 2 + 1_024_000, group())));
        let legacy = [
            swap,
            ("proc/self/cgroup", "4:memory:/a\n"),
            ("proc/self/mountinfo", "35 31 0:32 / /cg rw - cgroup cgroup rw,memory\n"),
            ("cg/a/memory.limit_in_bytes", "4000000000"),
            ("cg/a/memory.usage_in_bytes", "2000000000"),
            ("cg/a/memory.stat", "active_file 1\ntotal_inactive_file 300000000\ntotal_active_file 200000000\n"),
        ];
        assert_eq!(had(&legacy), Some((2 * GB + GB / 2 + 1_024_000, group())));
    }

    /// The story: a host's swap was added to groups that may not swap, and a budget beyond them accepted, whose run
    /// was killed.
    #[test]
    fn no_group_swaps_more_than_it_may() {
        let had = |files: &[(&str, &str)]| {
            let (_dir, machine) = machine(files);
            machine.obtainable().map(|a| (a.bytes, a.limit))
        };
        let swap = ("proc/meminfo", "MemAvailable: 8000000 kB\nSwapFree: 8000000 kB\n");
        let base = [
            swap,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
            ("sys/fs/cgroup/a/memory.max", "2000000000\n"),
            ("sys/fs/cgroup/a/memory.current", "500000000\n"),
            ("sys/fs/cgroup/a/memory.swap.current", "100000000\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.swap.current", "1000\n"),
        ];
        let outer = || Limit::Cgroup("/a".into());
        let with = |more: &[(&'static str, &'static str)]| had(&[&base, more].concat());
        let (max, high) = ("sys/fs/cgroup/a/memory.swap.max", "sys/fs/cgroup/a/memory.swap.high");
        assert_eq!(with(&[]), Some((GB + GB / 2 + MEMORY, outer())));
        assert_eq!(with(&[(max, "max\n"), (high, "max\n")]), Some((GB + GB / 2 + MEMORY, outer())));
        assert_eq!(with(&[(max, "0\n")]), Some((GB + GB / 2, outer())));
        assert_eq!(with(&[(max, "600000000\n")]), Some((2 * GB, outer())));
        assert_eq!(with(&[(max, "max\n"), (high, "600000000\n")]), Some((2 * GB, outer())));
        // A group within has no memory limit of its own, and may not swap: nor does what is around it.
        let inner = ("sys/fs/cgroup/a/b/memory.swap.max", "0\n");
        assert_eq!(with(&[inner]), Some((GB + GB / 2, outer())));
        let free = had(&[&base[..3], &[base[6], inner]].concat());
        assert_eq!(free, Some((MEMORY, Limit::Machine)));

        // Of version 1 memory and swap have one limit together.
        let legacy = [
            swap,
            ("proc/self/cgroup", "4:memory:/a\n"),
            ("proc/self/mountinfo", "35 31 0:32 / /cg rw - cgroup cgroup rw,memory\n"),
            ("cg/a/memory.limit_in_bytes", "4000000000"),
            ("cg/a/memory.usage_in_bytes", "2000000000"),
            ("cg/a/memory.memsw.usage_in_bytes", "2200000000"),
            ("cg/a/memory.stat", "total_inactive_file 300000000\ntotal_active_file 200000000\n"),
        ];
        let limit = "cg/a/memory.memsw.limit_in_bytes";
        let with = |both| had(&[&legacy[..], &[(limit, both)]].concat());
        assert_eq!(with("9223372036854771712"), Some((2 * GB + GB / 2 + MEMORY, outer())));
        assert_eq!(with("4000000000"), Some((2 * GB + 3 * GB / 10, outer())));
        assert_eq!(with("5000000000"), Some((3 * GB + 3 * GB / 10, outer())));
    }

    #[test]
    fn containers_see_a_part_of_the_tree() {
        // The mount shows the container's group as its top, or the path leads out of what is shown.
        for (root, path) in
            [("/docker/1", "/docker/1"), ("/docker/1", "/docker/1/gone"), ("/", "/../other"), ("/q", "/")]
        {
            let mounts = format!("31 23 0:28 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
            let (bytes, limit) = smallest(&[
                MEMINFO,
                ("proc/self/cgroup", &format!("0::{path}\n")),
                ("proc/self/mountinfo", &mounts),
                ("sys/fs/cgroup/memory.max", "3000000000"),
                ("sys/fs/cgroup/memory.current", "1000000000"),
            ]);
            assert_eq!((bytes, limit), (2 * GB, Limit::Cgroup(root.into())), "{root} {path}");
        }
    }

    #[test]
    fn limits_of_the_process_count_from_what_it_uses() {
        let status =
            ("proc/self/status", "VmSize:\t 1000000 kB\nVmData:\t  500000 kB\nVmHWM:\t 7 kB\nVmRSS:\t  3 kB\n");
        let limits = |data: &str, space: &str| {
            let text = format!(
                "Limit   Soft Limit  Hard Limit  Units\nMax data size  {data}  unlimited  bytes\n\
                                Max address space  {space}  unlimited  bytes\n"
            );
            smallest(&[MEMINFO, status, ("proc/self/limits", &text)])
        };
        assert_eq!(limits("unlimited", "unlimited"), (MEMORY, Limit::Machine));
        assert_eq!(limits("unlimited", "2000000000"), (2 * GB - 1_024_000_000, Limit::AddressSpace));
        assert_eq!(limits("1000000000", "2000000000"), (GB - 512_000_000, Limit::Data));
        assert_eq!(limits("1", "unlimited"), (0, Limit::Data));
        // Ten threads to come: their stacks, and what the C library sets aside for each.
        let limits = ("proc/self/limits", "Max data size  2000000000  x\nMax address space  4000000000  x\n");
        let (_dir, machine) = self::machine(&[MEMINFO, status, limits]);
        let with = |threads| machine.available(threads).map(|a| (a.bytes, a.limit));
        assert_eq!(with(0), Some((2 * GB - 512_000_000, Limit::Data)));
        assert_eq!(with(10), Some((2 * GB - 512_000_000 - 10 * (3 << 20), Limit::Data)));
        assert_eq!(with(30), Some((4 * GB - 1_024_000_000 - 30 * (68 << 20), Limit::AddressSpace)));
        let (_dir, machine) = self::machine(&[status]);
        assert_eq!((machine.peak_rss(), machine.rss()), (Some(7168), Some(3072)));
    }

    #[test]
    fn what_is_told_of_the_machine_is_what_it_says() {
        let (_dir, machine) = machine(&[
            ("proc/cpuinfo", "processor\t: 0\nmodel name\t: A Fast One @ 3 GHz\n"),
            ("proc/self/status", "Cpus_allowed_list:\t0-2,5\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ]);
        assert_eq!(machine.processor().as_deref(), Some("A Fast One @ 3 GHz"));
        assert_eq!((machine.processors(), machine.quota()), (Some(4), None));
        assert_eq!(machine.huge_pages().as_deref(), Some("madvise"));
        let (_dir, machine) = self::machine(&[]);
        assert_eq!((machine.processor(), machine.processors(), machine.huge_pages()), (None, None, None));
    }

    #[test]
    fn nonsense_sets_no_limit() {
        assert_eq!(
            smallest(&[
                MEMINFO,
                ("proc/self/cgroup", "0::\n:\n\n0::/a:b\nx:memory\n"),
                ("proc/self/mountinfo", "- \n1 2 3 - cgroup2\n1 2 3 / /cg\\9 - cgroup2 c\n1 2 3 / /cg - cgroup2 c\n"),
                ("proc/self/status", "VmSize: 99999999999999999999 kB\nVmData: 18446744073709551615 kB\n"),
                ("proc/self/limits", "Max address space\nMax data size x"),
                ("cg/memory.max", "99999999999999999999999"),
                ("cg/memory.current", "-5"),
                ("cg/cpu.max", "100000 0"),
            ]),
            (MEMORY, Limit::Machine)
        );
    }

    #[test]
    fn threads_are_cores_within_mask_and_quota() {
        // Two packages of two cores of two threads: siblings are n and n + 4.
        let mut files = vec![("proc/self/status".to_owned(), String::new())];
        for cpu in 0..8 {
            let name = if cpu < 4 { "core_cpus_list" } else { "thread_siblings_list" };
            let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/{name}");
            files.push((path, format!("{},{}\n", cpu % 4, cpu % 4 + 4)));
        }
        files.push((
            "proc/self/mountinfo".to_owned(),
            "1 1 0:1 / /two rw - cgroup2 x rw\n1 1 0:1 / /one rw - cgroup x rw,cpu\n".to_owned(),
        ));
        files.push(("proc/self/cgroup".to_owned(), "3:cpu:/s/t\n0::/a/b\n".to_owned()));
        let threads = |mask: &str, quotas: &[(&str, &str)]| {
            let mut files = files.clone();
            files[0].1 = format!("Name:\tk3\nCpus_allowed:\tff\nCpus_allowed_list:\t{mask}\n");
            let files: Vec<_> =
                files.iter().map(|(a, b)| (a.as_str(), b.as_str())).chain(quotas.iter().copied()).collect();
            let (_dir, machine) = machine(&files);
            machine.default_threads()
        };
        assert_eq!(threads("0-7", &[]), 4);
        assert_eq!(threads("0-3", &[]), 4);
        assert_eq!(threads("0,4", &[]), 1);
        assert_eq!(threads("0-1,4-6", &[]), 3);
        assert_eq!(threads("0-7,100-101", &[]), 6);
        assert_eq!(threads("0-4294967295", &[]), 1);
        let inner = ("two/a/b/cpu.max", "350000 100000\n");
        assert_eq!(threads("0-7", &[inner]), 3);
        assert_eq!(threads("0-7", &[inner, ("two/a/cpu.max", "50000 100000")]), 1);
        assert_eq!(threads("0-7", &[inner, ("two/a/cpu.max", "max 100000")]), 3);
        let period = ("one/s/cpu.cfs_period_us", "50000");
        let dir = ("one/s/t/cpu.shares", "1024");
        assert_eq!(threads("0-7", &[dir, period, ("one/s/cpu.cfs_quota_us", "100000")]), 2);
        assert_eq!(threads("0-7", &[dir, period, ("one/s/cpu.cfs_quota_us", "-1")]), 4);
    }

    #[test]
    fn this_machine_answers_and_memory_comes_and_goes() {
        let Some(free) = available(0) else {
            println!("SKIPPED: no /proc");
            return;
        };
        assert!(free.bytes > 0 && !free.limit.to_string().is_empty());
        assert!((1..=4096).contains(&default_threads()));
        let (Some(before), Some(peak)) = (rss(), peak_rss()) else {
            println!("SKIPPED: the system does not count resident memory");
            return;
        };
        assert!(before > 0 && peak > 0);
        const SIZE: usize = 256 << 20;
        let Ok(mut buf) = AlignedBuf::zeroed(SIZE) else {
            println!("SKIPPED: not even {SIZE} bytes of address space");
            return;
        };
        // Other tests run at the same time, so bounds are wide.
        assert!(rss().unwrap() < before + SIZE as u64 / 2, "untouched memory costs nothing");
        buf.fill(1);
        assert!(rss().unwrap() > SIZE as u64 && peak_rss().unwrap() > SIZE as u64);
        drop(buf);
        assert!(rss().unwrap() < SIZE as u64, "dropped memory went back");
    }
}
