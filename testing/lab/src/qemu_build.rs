//! Builds QEMU from Debian's source package with the lab's edits, in a separate root, and caches it for all work trees
//! of a user. Its data files and libraries are from Debian's binary package. Without a build, hosts run in that
//! package's QEMU.

use crate::apt::{self, Apt};
use crate::command::output;
use crate::heartbeat::Heartbeat;
use crate::image::{Images, fresh, write};
use crate::recipe::{self, Artifact};
use crate::{module_build, paths, progress, qemu_edits};
use anyhow::{Context, Result, bail};
use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Releases whose source packages are tried, the newest version of each first.
const SOURCE_RELEASES: &[&str] = &["sid", "trixie"];

/// Packages in QEMU's build root, from [`crate::recipe::QEMU_RELEASE`].
const PACKAGES: &[&str] = &[
    "base-files",
    "bash",
    "binutils",
    "bison",
    "bzip2",
    "coreutils",
    "dash",
    "diffutils",
    "findutils",
    "flex",
    "g++",
    "gawk",
    "gcc",
    "grep",
    "libattr1-dev",
    "libc6-dev",
    "libcap-ng-dev",
    "libfdt-dev",
    "libglib2.0-dev",
    "libpixman-1-dev",
    "libslirp-dev",
    "make",
    "meson",
    "ninja-build",
    "perl-base",
    "pkgconf",
    "python3",
    "python3-packaging",
    "python3-pip",
    "python3-venv",
    "sed",
    "tar",
    "xz-utils",
    "zlib1g-dev",
];

const SCRIPT: &str = include_str!("../assets/qemu-build.sh");
const DEVICES: &str = include_str!("../assets/qemu-devices.mak");
const PROGRAM: &str = "qemu-system-x86_64";
/// Path of the built program in its root.
const BUILT: &str = "build/out/qemu-system-x86_64";
const MAX_ERROR_LINES: usize = 6;

/// Returns the inputs of the build's recipe.
pub fn recipe() -> impl Iterator<Item = &'static str> {
    let lists = SOURCE_RELEASES.iter().chain(PACKAGES).copied();
    lists.chain([SCRIPT, DEVICES]).chain(qemu_edits::recipe())
}

impl Images {
    /// Returns a short text about QEMU's origin, for the emulator's description.
    pub(crate) fn qemu_origin(&self) -> String {
        match self.edited_qemu() {
            Some(program) => {
                let version = fs::read_to_string(program.with_file_name("version")).unwrap_or_default();
                format!("Debian's source {version} with the lab's edits")
            }
            None => "DEBIAN'S BINARY WITHOUT THE LAB'S EDITS; `lab images` builds it with them".to_owned(),
        }
    }

    /// Returns the built program of the current recipe, if any.
    pub(crate) fn edited_qemu(&self) -> Option<PathBuf> {
        Some(kept(&paths::qemu_cache()).join(PROGRAM)).filter(|program| program.is_file())
    }

    /// Builds and caches the program, or reports why it can't.
    pub(crate) fn build_edited_qemu(&self, work: &Path, heartbeat: &Heartbeat) {
        if let Err(e) = self.try_build(work, heartbeat) {
            progress!("WARNING: QEMU CAN'T BE BUILT WITH THE LAB'S EDITS, AND HOSTS RUN IN DEBIAN'S: {e:#}");
        }
    }

    fn try_build(&self, work: &Path, heartbeat: &Heartbeat) -> Result<()> {
        let cache = paths::qemu_cache();
        fs::create_dir_all(&cache).with_context(|| format!("Can't create {}", cache.display()))?;
        // Labs of several work trees share it.
        let lock = fs::File::create(cache.join("lock"))?;
        lock.lock().with_context(|| format!("Can't lock {}", cache.display()))?;
        if self.edited_qemu().is_some() {
            return Ok(());
        }
        let start = Instant::now();
        let apt = Apt::of(&self.qemu_root().with_file_name("apt-qemu"), recipe::QEMU_RELEASE)?;
        apt.update(false)?;
        let inside = build_root(&apt, work)?;
        let version = self.newest_that_builds(&cache, work, &inside, heartbeat)?;
        let part = fresh(&cache.join("part"))?;
        fs::copy(inside.join(BUILT), part.join(PROGRAM)).context("The build left no program")?;
        fs::write(part.join("version"), version)?;
        let kept = kept(&cache);
        if kept.exists() {
            fs::remove_dir_all(&kept)?;
        }
        fs::rename(&part, &kept).with_context(|| format!("Can't keep {}", kept.display()))?;
        progress!("images: edited-qemu built in {:.0} s", start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Builds the cached source, or else edits and builds the newest available one, which is then cached.
    fn newest_that_builds(
        &self,
        cache: &Path,
        work: &Path,
        inside: &Path,
        heartbeat: &Heartbeat,
    ) -> Result<String> {
        let source = cache.join("source");
        if source.exists() {
            match self.build_source(&source, inside, heartbeat) {
                Ok(version) => return Ok(version),
                Err(e) => progress!("images: edited-qemu: the kept source is passed over: {e:#}"),
            }
        }
        for release in SOURCE_RELEASES {
            let download = SourceApt::new(&work.join(format!("apt-source-{release}")), release)?;
            for version in download.versions()? {
                let dir = fresh(&work.join("source"))?;
                match download.fetch(&version, &dir).and_then(|()| self.build_source(&dir, inside, heartbeat))
                {
                    Ok(version) => {
                        fresh(&source)?;
                        for file in fs::read_dir(&dir)?.flatten() {
                            fs::copy(file.path(), source.join(file.file_name()))?;
                        }
                        return Ok(version);
                    }
                    Err(e) => {
                        progress!("images: edited-qemu: {release}'s source {version} is passed over: {e:#}")
                    }
                }
            }
        }
        bail!(
            "No source package of QEMU in {} can be downloaded, edited and built",
            SOURCE_RELEASES.join(" or ")
        )
    }

    /// Edits and builds the source package in `dir`; returns its version after a test run of the program.
    fn build_source(&self, dir: &Path, inside: &Path, heartbeat: &Heartbeat) -> Result<String> {
        let source = inside.join("build/qemu");
        let version = unpack(dir, &source)?;
        write(&source.join("configs/devices/x86_64-softmmu/lab.mak"), DEVICES, 0o644)?;
        write(&inside.join("build/build.sh"), SCRIPT, 0o755)?;
        progress!("images: edited-qemu: building {version}");
        compile(inside, heartbeat)?;
        let root = self.qemu_root();
        let mut command = Command::new(root.join("usr/lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(root.join("usr/lib/x86_64-linux-gnu"));
        output(command.arg(inside.join(BUILT)).arg("--version")).context("The built QEMU doesn't run")?;
        Ok(version)
    }
}

/// Returns the directory of the built program in `cache`, by its recipe.
fn kept(cache: &Path) -> PathBuf {
    cache.join(Artifact::EditedQemu.recipe())
}

/// Creates a root with everything that QEMU's build needs.
fn build_root(apt: &Apt, work: &Path) -> Result<PathBuf> {
    let packages = apt.fetch(PACKAGES, false)?;
    let inside = fresh(&work.join("root"))?;
    apt::unpack(&packages, &inside)?;
    for dir in ["proc", "dev", "tmp", "build"] {
        fs::create_dir_all(inside.join(dir))?;
    }
    for (link, to) in [("usr/bin/awk", "gawk"), ("usr/bin/cc", "gcc")] {
        if !inside.join(link).is_symlink() {
            std::os::unix::fs::symlink(to, inside.join(link))?;
        }
    }
    output(Command::new("/sbin/ldconfig").arg("-r").arg(&inside))?;
    Ok(inside)
}

/// Unpacks the source package in `dir` and edits it; returns its version.
fn unpack(dir: &Path, source: &Path) -> Result<String> {
    let entries = fs::read_dir(dir).with_context(|| format!("Can't read {}", dir.display()))?;
    let description = entries
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|e| e == "dsc"))
        .context("No source package")?;
    if source.exists() {
        fs::remove_dir_all(source)?;
    }
    output(Command::new("dpkg-source").args(["-x", "--no-check"]).arg(&description).arg(source))?;
    qemu_edits::apply(source)?;
    let name = description.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(name.trim_start_matches("qemu_").to_owned())
}

/// apt with a private state that has source packages only.
struct SourceApt {
    dir: PathBuf,
}

impl SourceApt {
    fn new(dir: &Path, release: &str) -> Result<Self> {
        let apt = SourceApt { dir: dir.to_path_buf() };
        // The private state of another release, whose sources are replaced.
        Apt::of(dir, release)?;
        let sources = dir.join("sources");
        let mut line = None;
        for entry in fs::read_dir(&sources)?.flatten() {
            let text = fs::read_to_string(entry.path())?;
            line = line.or_else(|| source_line(&text, release));
            fs::remove_file(entry.path())?;
        }
        let line = line.context("No mirror of Debian in the system's package sources")?;
        fs::write(sources.join("source.list"), line)?;
        apt.command("apt-get", &["update", "-q"], dir).context("Can't fetch the lists of source packages")?;
        Ok(apt)
    }

    fn command(&self, program: &str, args: &[&str], dir: &Path) -> Result<String> {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.dir.join("apt.conf")).env("LC_ALL", "C").current_dir(dir);
        Ok(String::from_utf8_lossy(&output(command.args(args))?).into_owned())
    }

    fn versions(&self) -> Result<Vec<String>> {
        Ok(newest_first(versions(&self.command("apt-cache", &["showsrc", "qemu"], &self.dir)?)))
    }

    fn fetch(&self, version: &str, dir: &Path) -> Result<()> {
        let which = format!("qemu={version}");
        self.command("apt-get", &["-q", "source", "--download-only", &which], dir).map(drop)
    }
}

/// Returns the `deb-src` line for the mirror of a package sources file, in either format.
fn source_line(text: &str, release: &str) -> Option<String> {
    let field = |name: &str| text.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
    let mirror = match field("URIs:") {
        Some(uris) => uris.split_whitespace().next()?,
        None => field("deb ")?.split_whitespace().find(|w| w.contains("://"))?,
    };
    if mirror.contains("security") {
        return None;
    }
    let signed = field("Signed-By:").map(|key| format!("[signed-by={key}] ")).unwrap_or_default();
    Some(format!("deb-src {signed}{mirror} {release} main\n"))
}

fn versions(shown: &str) -> Vec<String> {
    shown.lines().filter_map(|l| l.strip_prefix("Version:")).map(|v| v.trim().to_owned()).collect()
}

fn newest_first(mut versions: Vec<String>) -> Vec<String> {
    let newer = |a: &str, b: &str| {
        Command::new("dpkg").args(["--compare-versions", a, "gt", b]).status().is_ok_and(|s| s.success())
    };
    versions.sort_by(|a, b| newer(b, a).cmp(&newer(a, b)));
    versions
}

/// Builds in the root.
fn compile(inside: &Path, heartbeat: &Heartbeat) -> Result<()> {
    let jobs = std::thread::available_parallelism().map_or(1, usize::from).to_string();
    let mut child = module_build::command(inside, &jobs)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("Can't run unshare; is util-linux installed?")?;
    let pipe = child.stdout.take().context("No pipe from the build")?;
    let mut tail = VecDeque::new();
    for line in BufReader::new(pipe).lines() {
        let line = line.context("Can't read what the build says")?;
        if let Some(steps) = steps(&line) {
            heartbeat.step(&steps);
        }
        tail.push_back(line);
        tail.drain(..tail.len().saturating_sub(MAX_ERROR_LINES));
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("The build ended with {status}: {}", Vec::from(tail).join(" / "));
    }
    Ok(())
}

/// Converts ninja's `[12/345] …` into words.
fn steps(line: &str) -> Option<String> {
    let (done, total) = line.strip_prefix('[')?.split_once(']')?.0.split_once('/')?;
    Some(format!("{} of {} steps", done.parse::<u32>().ok()?, total.parse::<u32>().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_line_is_made_of_either_format() {
        let deb822 = "Types: deb\nURIs: http://mirror/debian\nSuites: sid\nSigned-By: /k.gpg\n";
        assert_eq!(
            source_line(deb822, "sid").unwrap(),
            "deb-src [signed-by=/k.gpg] http://mirror/debian sid main\n"
        );
        assert_eq!(
            source_line("deb http://mirror/debian sid main\n", "sid").unwrap(),
            "deb-src http://mirror/debian sid main\n"
        );
        assert_eq!(source_line("URIs: http://mirror/debian-security\n", "sid"), None);
    }

    #[test]
    fn steps_are_read() {
        assert_eq!(steps("[12/345] Compiling").unwrap(), "12 of 345 steps");
        assert_eq!(steps("[warning] x"), None);
    }

    #[test]
    fn versions_are_tried_newest_first() {
        let shown = "Package: qemu\nVersion: 1:10.2.2+ds-1\n\nVersion: 1:11.1.3+ds-1\n";
        assert_eq!(newest_first(versions(shown)), ["1:11.1.3+ds-1", "1:10.2.2+ds-1"]);
    }
}
