//! Debian packages without root, and without the system's package database. apt resolves against an empty status file
//! and downloads into the lab's cache. `dpkg-deb` unpacks. No maintainer script runs.

use crate::command::output;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// apt with a private state.
#[derive(Debug)]
pub struct Apt {
    dir: PathBuf,
    codename: String,
}

/// A resolved package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// The package's name.
    pub name: String,
    /// The version, including the epoch.
    pub version: String,
    /// Architecture: `amd64` or `all`.
    pub arch: String,
}

impl Resolved {
    /// Returns apt's file name of the downloaded package.
    pub fn file(&self) -> String {
        format!("{}_{}_{}.deb", self.name, self.version.replace(':', "%3a"), self.arch)
    }
}

/// Parses `Inst name (version archive [arch])` lines of a simulated installation.
fn parse_simulation(text: &str) -> Vec<Resolved> {
    text.lines()
        .filter_map(|line| {
            let rest = line.strip_prefix("Inst ")?;
            let (name, rest) = rest.split_once(' ')?;
            let rest = &rest[rest.find('(')? + 1..rest.find(')')?];
            let version = rest.split_whitespace().next()?;
            let arch = &rest[rest.rfind('[')? + 1..rest.rfind(']')?];
            Some(Resolved { name: name.to_owned(), version: version.to_owned(), arch: arch.to_owned() })
        })
        .collect()
}

/// Converts a Debian source file of the release `system` to the release `codename`, with its backports suite. Returns
/// `None` if the file has no Debian release.
fn sources_of(text: &str, system: &str, codename: &str, deb822: bool) -> Option<String> {
    let backports = format!("{codename}-backports");
    let text = &text.replace(system, codename);
    let mut out = String::new();
    let mut ours = false;
    for line in text.lines() {
        out.push_str(line);
        if deb822 {
            let suites = line.strip_prefix("Suites:").map(|s| s.split_whitespace().collect::<Vec<_>>());
            if let Some(suites) = suites {
                ours |= suites.iter().any(|s| s.starts_with(codename));
                if suites.contains(&codename) && !suites.contains(&backports.as_str()) {
                    out.push_str(&format!(" {backports}"));
                }
            }
        } else if line.starts_with("deb ") {
            let words: Vec<&str> = line.split_whitespace().collect();
            ours |= words.iter().any(|w| w.starts_with(codename));
            if words.contains(&codename) && !text.contains(&backports) {
                let twin: Vec<&str> =
                    words.iter().map(|w| if *w == codename { backports.as_str() } else { w }).collect();
                out.push_str(&format!("\n{}", twin.join(" ")));
            }
        }
        out.push('\n');
    }
    ours.then_some(out)
}

fn codename() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("Can't read /etc/os-release")?;
    let value = text
        .lines()
        .find_map(|l| l.strip_prefix("VERSION_CODENAME="))
        .map(|v| v.trim_matches('"').to_owned());
    match value {
        Some(c) if text.contains("ID=debian") => Ok(c),
        _ => bail!("The lab builds its images from Debian's package sources; this system isn't Debian"),
    }
}

impl Apt {
    /// Creates the private state below `dir`, for the system's own release.
    pub fn new(dir: &Path) -> Result<Self> {
        let system = codename()?;
        Self::of_release(dir, &system.clone(), &system)
    }

    /// Does the same for the Debian release `codename`, from the system's mirror.
    pub fn of(dir: &Path, codename_wanted: &str) -> Result<Self> {
        Self::of_release(dir, &codename()?, codename_wanted)
    }

    fn of_release(dir: &Path, system: &str, wanted: &str) -> Result<Self> {
        let apt = Apt { dir: dir.to_path_buf(), codename: wanted.to_owned() };
        for sub in ["lists/partial", "archives/partial", "sources"] {
            fs::create_dir_all(apt.dir.join(sub))
                .with_context(|| format!("Can't create {}", apt.dir.display()))?;
        }
        fs::write(apt.dir.join("status"), "")?;
        let mut found = 0;
        let listed =
            fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|e| e.path());
        for path in listed.chain([PathBuf::from("/etc/apt/sources.list")]) {
            let deb822 = path.extension().is_some_and(|e| e == "sources");
            if !deb822 && path.extension().is_none_or(|e| e != "list") {
                continue;
            }
            let Ok(text) = fs::read_to_string(&path) else { continue };
            if let (Some(text), Some(name)) = (sources_of(&text, system, wanted, deb822), path.file_name()) {
                fs::write(apt.dir.join("sources").join(name), text)?;
                found += 1;
            }
        }
        if found == 0 {
            bail!(
                "No package source for Debian {system} in /etc/apt: the lab has nothing to build its images from"
            );
        }
        // The system's settings for the mirror apply; all others are private.
        let system = output(Command::new("apt-config").arg("dump")).unwrap_or_default();
        let reach: String = String::from_utf8_lossy(&system)
            .lines()
            .filter(|l| l.starts_with("Acquire::") && !l.starts_with("Acquire::Languages"))
            .map(|l| format!("{l}\n"))
            .collect();
        let d = apt.dir.display();
        let text = format!(
            "{reach}Dir::Etc::parts \"/nonexistent\";\nDir::State \"{d}\";\nDir::State::lists \"lists\";\nDir::State::status \"{d}/status\";\n\
             Dir::Cache \"{d}\";\nDir::Cache::archives \"archives\";\nDir::Etc::sourcelist \"/dev/null\";\nDir::Etc::sourceparts \"{d}/sources\";\n\
             Dir::Etc::preferences \"/dev/null\";\nDir::Etc::preferencesparts \"/nonexistent\";\nAPT::Install-Recommends \"false\";\n\
             APT::Architecture \"amd64\";\nAPT::Architectures {{ \"amd64\"; }};\nAPT::Sandbox::User \"root\";\nAcquire::Languages \"none\";\n\
             Acquire::Retries \"3\";\n"
        );
        fs::write(apt.dir.join("apt.conf"), text)?;
        Ok(apt)
    }

    fn run(&self, program: &str, args: &[&str]) -> Result<Vec<u8>> {
        let mut command = Command::new(program);
        command.env("APT_CONFIG", self.dir.join("apt.conf")).env("LC_ALL", "C").args(args);
        output(&mut command)
    }

    /// Fetches the package lists, if there are none or `always`.
    pub fn update(&self, always: bool) -> Result<()> {
        let have = fs::read_dir(self.dir.join("lists"))?.flatten().any(|e| e.path().is_file());
        if always || !have {
            self.run("apt-get", &["update", "-q"]).context("Can't fetch Debian's package lists")?;
        }
        Ok(())
    }

    /// Resolves packages with all dependencies, downloads them, and returns their files.
    pub fn fetch(&self, packages: &[&str], backports: bool) -> Result<Vec<PathBuf>> {
        match self.fetch_once(packages, backports) {
            Ok(files) => Ok(files),
            // Old lists name files that the mirror has since replaced.
            Err(_) => {
                self.update(true)?;
                self.fetch_once(packages, backports)
            }
        }
    }

    fn fetch_once(&self, packages: &[&str], backports: bool) -> Result<Vec<PathBuf>> {
        let suite = format!("{}-backports", self.codename);
        let mut args = vec!["-q", "-y", "install"];
        if backports {
            args.extend(["-t", &suite]);
        }
        args.extend(packages);
        let plan = [&["--simulate"], args.as_slice()].concat();
        let resolved = parse_simulation(&String::from_utf8_lossy(&self.run("apt-get", &plan)?));
        if resolved.is_empty() {
            bail!("apt resolved {} packages to nothing", packages.len());
        }
        self.run("apt-get", &[&["--download-only"], args.as_slice()].concat())?;
        resolved.iter().map(|r| self.archive(&r.file())).collect()
    }

    fn archive(&self, file: &str) -> Result<PathBuf> {
        let path = self.dir.join("archives").join(file);
        if !path.is_file() {
            bail!("apt said it downloaded {file}, but {} isn't there", path.display());
        }
        Ok(path)
    }

    /// Downloads one package without dependencies; without a version, the newest.
    pub fn download(&self, name: &str, version: Option<&str>) -> Result<PathBuf> {
        let which = version.map_or_else(|| name.to_owned(), |v| format!("{name}={v}"));
        let shown = String::from_utf8_lossy(&self.run("apt-cache", &["show", "--no-all-versions", &which])?)
            .into_owned();
        let field = |f: &str| {
            shown.lines().find_map(|l| l.strip_prefix(f)).map(str::trim).unwrap_or_default().to_owned()
        };
        let resolved =
            Resolved { name: name.to_owned(), version: field("Version:"), arch: field("Architecture:") };
        let mut command = Command::new("apt-get");
        command
            .env("APT_CONFIG", self.dir.join("apt.conf"))
            .env("LC_ALL", "C")
            .current_dir(self.dir.join("archives"));
        output(command.args(["-q", "download", &format!("{name}={}", resolved.version)]))?;
        self.archive(&resolved.file())
    }

    /// Returns the first dependency with the prefix `prefix` of any version of `name`, newest first.
    pub fn dependency(&self, name: &str, prefix: &str) -> Result<String> {
        let text = String::from_utf8_lossy(&self.run("apt-cache", &["show", name])?).into_owned();
        dependency(&text, prefix)
            .with_context(|| format!("No version of {name} depends on a package {prefix}…"))
    }

    /// Downloads the newest kernel package with the prefix `prefix` that `meta` depends on.
    pub fn kernel(&self, meta: &str, prefix: &str) -> Result<PathBuf> {
        let find = || -> Result<PathBuf> {
            let name = self
                .dependency(meta, prefix)
                .with_context(|| format!("Can't find a kernel {prefix}…; are the backports reachable?"))?;
            self.download(&name, None)
        };
        find().or_else(|_| self.update(true).and_then(|()| find()))
    }
}

/// Returns the version in the name of a downloaded package.
pub fn version_of(package: &Path) -> Option<String> {
    let name = package.file_name()?.to_str()?;
    Some(name.split('_').nth(1)?.replace("%3a", ":"))
}

/// Returns the first package with the prefix `prefix` in the `Depends` lines of a package's versions.
fn dependency(text: &str, prefix: &str) -> Option<String> {
    text.lines()
        .filter_map(|l| l.strip_prefix("Depends:"))
        .flat_map(|l| l.split(','))
        .filter_map(|d| d.split_whitespace().next())
        .find(|d| d.starts_with(prefix))
        .map(str::to_owned)
}

/// Documentation and translations, which the lab doesn't use: a third of many packages.
const LEFT_OUT: &[&str] = &[
    "./usr/share/doc",
    "./usr/share/man",
    "./usr/share/locale",
    "./usr/share/info",
    "./usr/share/lintian",
    "./usr/share/bug",
];

/// Unpacks packages on top of each other into a tree whose `/bin`, `/sbin` and `/lib` are links into `/usr`.
pub fn unpack(packages: &[PathBuf], root: &Path) -> Result<()> {
    for dir in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(root.join("usr").join(dir))?;
        let link = root.join(dir);
        if !link.is_symlink() {
            std::os::unix::fs::symlink(format!("usr/{dir}"), &link)?;
        }
    }
    for package in packages {
        unpack_one(package, root, &[])?;
    }
    Ok(())
}

/// Unpacks one package, or with `only` just those of its paths (`./boot`).
pub fn unpack_one(package: &Path, root: &Path, only: &[&str]) -> Result<()> {
    unpack_without(package, root, only, LEFT_OUT)
}

/// Unpacks just these paths of a package, even those that are usually omitted.
pub fn unpack_paths(package: &Path, root: &Path, only: &[&str]) -> Result<()> {
    unpack_without(package, root, only, &[])
}

fn unpack_without(package: &Path, root: &Path, only: &[&str], left_out: &[&str]) -> Result<()> {
    let mut reader = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .context("Can't run dpkg-deb; is it installed?")?;
    let pipe = reader.stdout.take().context("No pipe from dpkg-deb")?;
    let mut tar = Command::new("tar");
    tar.arg("-x").arg("-C").arg(root).args(["--keep-directory-symlink", "--no-same-owner"]);
    for path in left_out {
        tar.arg(format!("--exclude={path}"));
    }
    let got = tar.args(only).stdin(pipe).output().context("Can't run tar; is it installed?")?;
    let read = reader.wait()?;
    // dpkg-deb fails on a closed pipe if tar needs only a part. Then tar's status counts.
    if !got.status.success() || (only.is_empty() && !read.success()) {
        bail!("Can't unpack {}: {}", package.display(), String::from_utf8_lossy(&got.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simulated_installations_are_read() {
        let text = "NOTE: x\nInst libc6 (2.36-9 Debian:12/stable [amd64]) []\nInst adduser (3.134 A:12/b, B:12/c [all])\nConf libc6 (2 D [amd64])\n\
                    Inst qemu (1:7.2+dfsg-7 Debian [amd64])\n";
        let got = parse_simulation(text);
        assert_eq!(got.len(), 3);
        assert_eq!(got[1].file(), "adduser_3.134_all.deb");
        assert_eq!(got[2].file(), "qemu_1%3a7.2+dfsg-7_amd64.deb");
    }

    #[test]
    fn backports_join_the_right_sources() {
        let text = "Types: deb\nURIs: http://mirror/debian\nSuites: bookworm bookworm-updates\nComponents: main\n\nSuites: bookworm-security\n";
        let got = sources_of(text, "bookworm", "bookworm", true).unwrap();
        assert!(got.contains("Suites: bookworm bookworm-updates bookworm-backports\n"));
        assert!(got.contains("Suites: bookworm-security\n"));
        assert_eq!(sources_of(&got, "bookworm", "bookworm", true).unwrap(), got);
        assert_eq!(sources_of("Suites: nodistro\n", "bookworm", "bookworm", true), None);
        let newer = sources_of(text, "bookworm", "trixie", true).unwrap();
        assert!(
            newer.contains("Suites: trixie trixie-updates trixie-backports\n") && !newer.contains("bookworm")
        );
        let line =
            sources_of("deb [a=b] http://mirror/debian bookworm main\n", "bookworm", "bookworm", false)
                .unwrap();
        assert!(line.contains("deb [a=b] http://mirror/debian bookworm-backports main"));
    }

    #[test]
    fn a_kernel_is_found_in_the_dependencies() {
        let text =
            "Depends: linux-image-6.12.95+deb12-amd64 (= 6)\n\nDepends: linux-image-6.1.0-56-amd64 (= 6.1)\n";
        assert_eq!(dependency(text, "linux-image-6.1.").unwrap(), "linux-image-6.1.0-56-amd64");
        assert_eq!(dependency(text, "linux-image-7."), None);
        let headers = "Depends: linux-headers-6.1.0-56-common (= 6.1.192-2), linux-kbuild-6.1 (>= 6.1.192-2), linux-compiler-gcc-12-x86\n";
        assert_eq!(dependency(headers, "linux-kbuild-").unwrap(), "linux-kbuild-6.1");
    }
}
