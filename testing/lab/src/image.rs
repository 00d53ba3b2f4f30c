//! Builds and caches images. Each artifact has a stamp with the hash of its recipe, and is rebuilt when the hash
//! differs. A lock file prevents concurrent builds by two labs.

use crate::apt::{self, Apt};
use crate::command::output;
use crate::cpio::Archive;
use crate::heartbeat::Heartbeat;
use crate::kernel::{self, Modules};
use crate::recipe::{self, Artifact};
use crate::{paths, progress};
use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The images of the lab; all exist.
#[derive(Debug, Clone)]
pub struct Images {
    dir: PathBuf,
}

impl Images {
    /// Builds missing or outdated images of `wanted`, and reports progress on stderr.
    pub fn ready(wanted: &[Artifact]) -> Result<Self> {
        let dir = paths::cache();
        fs::create_dir_all(&dir)
            .with_context(|| format!("Can't create the lab's cache {}", dir.display()))?;
        let images = Images { dir: fs::canonicalize(&dir)? };
        if images.outdated(wanted).is_empty() {
            return Ok(images);
        }
        let lock = fs::File::create(images.dir.join("lock"))?;
        if lock.try_lock().is_err() {
            progress!("another lab is building images; waiting for it");
            lock.lock().context("Can't lock the lab's cache")?;
        }
        let todo = images.outdated(wanted);
        if !todo.is_empty() {
            tools()?;
            let apt = Apt::new(&images.dir.join("apt"))?;
            // This one is built from the others' inputs.
            if todo != [Artifact::Newer] {
                progress!("images: package lists");
                apt.update(false)?;
            }
            for artifact in todo {
                images
                    .build(artifact, &apt)
                    .with_context(|| format!("Can't build the lab's {} image", artifact.name()))?;
            }
        }
        Ok(images)
    }

    fn stamp(&self, artifact: Artifact) -> PathBuf {
        self.dir.join(format!("{}.stamp", artifact.name()))
    }

    fn outdated(&self, wanted: &[Artifact]) -> Vec<Artifact> {
        let good = |a: &Artifact| match a {
            Artifact::EditedQemu => self.edited_qemu().is_some(),
            _ => fs::read_to_string(self.stamp(*a)).is_ok_and(|s| s.trim() == a.recipe()),
        };
        let mut stale = false;
        Artifact::ALL
            .into_iter()
            .filter(|a| wanted.contains(a))
            .filter(|a| {
                // Hosts and guests are built from the kernels.
                let build = !good(a)
                    || (stale && !matches!(a, Artifact::Qemu | Artifact::EditedQemu | Artifact::Kernels));
                stale |= build && *a == Artifact::Kernels;
                build
            })
            .collect()
    }

    fn build(&self, artifact: Artifact, apt: &Apt) -> Result<()> {
        let start = Instant::now();
        let stamp = self.stamp(artifact);
        if stamp.exists() {
            fs::remove_file(&stamp)?;
        }
        progress!("images: building {}", artifact.name());
        let heartbeat = Heartbeat::start(format!("images: building {}", artifact.name()));
        let work = tempfile::Builder::new().prefix("build-").tempdir_in(&self.dir)?;
        match artifact {
            Artifact::Qemu => self.qemu()?,
            // Cached elsewhere, without a stamp. Without it, hosts run in Debian's QEMU.
            Artifact::EditedQemu => {
                self.build_edited_qemu(work.path(), &heartbeat);
                return Ok(());
            }
            Artifact::Kernels => self.kernels(apt)?,
            Artifact::Host => self.host(apt, work.path())?,
            Artifact::Newer => self.newer()?,
            Artifact::Guest => self.guest(apt, work.path())?,
            Artifact::Rdma => self.rdma(apt, work.path())?,
            Artifact::Neighbours => self.neighbours(apt, work.path())?,
            Artifact::Appliance => self.appliance(apt, work.path())?,
        }
        fs::write(&stamp, artifact.recipe())?;
        progress!("images: {} built in {:.0} s", artifact.name(), start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Returns the directory of the unpacked newer QEMU.
    pub fn qemu_root(&self) -> PathBuf {
        self.dir.join("qemu")
    }

    /// Returns the directory of a kernel: `vmlinuz`, `vmlinux`, `config`, `modules/`, `release`.
    pub fn kernel(&self, name: &str) -> PathBuf {
        self.dir.join("kernels").join(name)
    }

    /// Returns the hosts' kernel, the usual or the newer one.
    pub fn host_kernel(&self, newer: bool) -> PathBuf {
        self.kernel(if newer { recipe::NEWER_KERNEL } else { recipe::KERNELS[0].name }).join("vmlinux")
    }

    /// Returns the hosts' initramfs, for the usual or the newer kernel.
    pub fn host_initrd(&self, newer: bool) -> PathBuf {
        self.dir.join(if newer { "newer.initrd" } else { "host.initrd" })
    }

    /// Returns the hosts' root disk.
    pub fn host_root(&self) -> PathBuf {
        self.dir.join("host.img")
    }

    /// Returns the disk that hosts mount at `/lab`.
    pub fn guest_disk(&self) -> PathBuf {
        self.dir.join("guest.img")
    }

    /// Returns the root disk of guests with RDMA.
    pub fn rdma_root(&self) -> PathBuf {
        self.dir.join("rdma.img")
    }

    /// Returns the root disk of guests that form a storage appliance.
    pub fn appliance_root(&self) -> PathBuf {
        self.dir.join("appliance.img")
    }

    fn qemu(&self) -> Result<()> {
        let apt = Apt::of(&self.dir.join("apt-qemu"), recipe::QEMU_RELEASE)?;
        apt.update(false)?;
        let packages = apt.fetch(recipe::QEMU_PACKAGES, true)?;
        let root = fresh(&self.qemu_root())?;
        apt::unpack(&packages, &root)
    }

    fn kernels(&self, apt: &Apt) -> Result<()> {
        fresh(&self.dir.join("kernels"))?;
        for k in recipe::KERNELS {
            let package = apt.kernel(k.meta, k.prefix)?;
            let dir = fresh(&self.kernel(k.name))?;
            apt::unpack_one(&package, &dir, &[])?;
            let find = |what: &str| -> Result<PathBuf> {
                let boot = fs::read_dir(dir.join("boot"))?.flatten().map(|e| e.path());
                boot.into_iter()
                    .find(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(what)))
                    .with_context(|| format!("The package {} has no {what}", package.display()))
            };
            let image = find("vmlinuz-")?;
            let release =
                image.file_name().map(|n| n.to_string_lossy().replace("vmlinuz-", "")).unwrap_or_default();
            fs::write(dir.join("vmlinux"), kernel::vmlinux(&fs::read(&image)?)?)?;
            fs::rename(image, dir.join("vmlinuz"))?;
            fs::rename(find("config-")?, dir.join("config"))?;
            let modules =
                [dir.join("usr/lib/modules"), dir.join("lib/modules")].into_iter().find(|p| p.is_dir());
            let modules =
                modules.with_context(|| format!("The package {} has no modules", package.display()))?;
            fs::rename(modules.join(&release), dir.join("modules"))?;
            fs::write(dir.join("release"), &release)?;
            for rest in ["boot", "lib", "usr"] {
                if dir.join(rest).exists() {
                    fs::remove_dir_all(dir.join(rest))?;
                }
            }
            kernel::unpack_modules(&dir.join("modules"))?;
        }
        Ok(())
    }

    pub(crate) fn release(&self, name: &str) -> Result<String> {
        let path = self.kernel(name).join("release");
        fs::read_to_string(&path).with_context(|| format!("Can't read {}", path.display()))
    }

    fn host(&self, apt: &Apt, work: &Path) -> Result<()> {
        let packages = apt.fetch(recipe::HOST_PACKAGES, false)?;
        let root = fresh(&work.join("root"))?;
        apt::unpack(&packages, &root)?;
        basics(&root, "lab")?;
        write(&root.join("usr/sbin/lab-init"), recipe::HOST_INIT, 0o755)?;
        let kernel = recipe::KERNELS[0].name;
        let (release, modules) = (self.release(kernel)?, self.kernel(kernel).join("modules"));
        let target = root.join("usr/lib/modules").join(&release);
        copy_modules(&modules.join("kernel"), &target.join("kernel"), recipe::HOST_MODULES_LEFT_OUT)?;
        depmod(&modules, &target, &root, &root, &release)?;
        ext4(&root, &self.host_root(), "labhost", 25)?;
        let order = Modules::scan(&modules)?.in_order(recipe::HOST_INITRD_MODULES)?;
        let initrd = initrd(&root, recipe::HOST_INITRD_INIT, &order)?;
        put(&self.host_initrd(false), &initrd)
    }

    /// Builds the hosts' initramfs with an appended archive for a newer kernel, which takes precedence. It contains
    /// that kernel's modules: the hosts' root disk has only the usual kernel's.
    fn newer(&self) -> Result<()> {
        let folder = self.kernel(recipe::NEWER_KERNEL).join("modules");
        let modules = Modules::scan(&folder)?;
        let mut more = Archive::new();
        let after = [recipe::NEWER_INIT, recipe::NEWER_INIT_BEFORE].concat();
        let init = recipe::HOST_INITRD_INIT.replace(recipe::NEWER_INIT_BEFORE, &after);
        more.file("init", 0o755, init.as_bytes());
        let first = modules.in_order(recipe::HOST_INITRD_MODULES)?;
        for (name, path) in &first {
            more.file(&format!("modules/{name}.ko"), 0o644, &fs::read(path)?);
        }
        let order: String = first.iter().map(|(name, _)| format!("{name}\n")).collect();
        more.file("modules/order", 0o644, order.as_bytes());
        for (name, path) in modules.in_order(recipe::NEWER_MODULES)? {
            more.file(&format!("newer/kernel/{name}.ko"), 0o644, &fs::read(path)?);
        }
        for list in ["modules.order", "modules.builtin", "modules.builtin.modinfo"] {
            more.file(&format!("newer/{list}"), 0o644, &fs::read(folder.join(list))?);
        }
        let mut bytes = fs::read(self.host_initrd(false)).context("Can't read the hosts' initramfs")?;
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend(more.finish());
        put(&self.host_initrd(true), &bytes)
    }

    fn guest(&self, apt: &Apt, work: &Path) -> Result<()> {
        let packages = apt.fetch(recipe::GUEST_PACKAGES, false)?;
        let root = fresh(&work.join("root"))?;
        apt::unpack(&packages, &root)?;
        basics(&root, "guest")?;
        let disk = fresh(&work.join("disk"))?;
        for k in recipe::KERNELS {
            let modules = Modules::scan(&self.kernel(k.name).join("modules"))?;
            let release = self.release(k.name)?;
            let target = root.join("usr/lib/modules").join(&release);
            fs::create_dir_all(target.join("kernel"))?;
            for (name, path) in modules.in_order(recipe::GUEST_ROOT_MODULES)? {
                fs::copy(path, target.join("kernel").join(format!("{name}.ko")))?;
            }
            depmod(&self.kernel(k.name).join("modules"), &target, &root, &root, &release)?;
            let dir = fresh(&disk.join(k.name))?;
            for file in ["vmlinux", "vmlinuz"] {
                fs::copy(self.kernel(k.name).join(file), dir.join(file))?;
            }
            let order = modules.in_order(recipe::GUEST_INITRD_MODULES)?;
            fs::write(dir.join("initrd"), initrd(&root, recipe::GUEST_INIT, &order)?)?;
        }
        ext4(&root, &disk.join("root.img"), "labguest", 25)?;
        ext4(&disk, &self.guest_disk(), "labdisk", 10)
    }
}

/// Writes an initramfs atomically: another lab may be booting from the old one.
fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    let part = path.with_extension("part");
    fs::write(&part, bytes).context("Can't write the hosts' initramfs")?;
    fs::rename(&part, path).context("Can't put the hosts' initramfs in place")
}

/// Checks for the programs that a build needs. One error names all missing ones.
fn tools() -> Result<()> {
    const NEEDED: &[(&str, &str)] = &[
        ("apt-get", "apt"),
        ("dpkg-deb", "dpkg"),
        ("tar", "tar"),
        ("xz", "xz-utils"),
        ("zstd", "zstd"),
        ("lz4", "lz4"),
        ("mke2fs", "e2fsprogs"),
        ("setpriv", "util-linux"),
        ("qemu-system-x86_64", "qemu-system-x86"),
    ];
    let dirs = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let missing: Vec<&str> = NEEDED
        .iter()
        .filter(|(program, _)| !dirs.split(':').any(|d| Path::new(d).join(program).exists()))
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        Ok(())
    } else {
        bail!("The lab needs these Debian packages: {}", missing.join(", "))
    }
}

pub(crate) fn fresh(dir: &Path) -> Result<PathBuf> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("Can't clear {}", dir.display()))?;
    }
    fs::create_dir_all(dir).with_context(|| format!("Can't create {}", dir.display()))?;
    Ok(dir.to_path_buf())
}

pub(crate) fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    // A package may have created a link there.
    if path.is_symlink() {
        fs::remove_file(path)?;
    }
    fs::write(path, text).with_context(|| format!("Can't write {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(())
}

/// Does the necessary parts of the maintainer scripts.
pub(crate) fn basics(root: &Path, name: &str) -> Result<()> {
    for dir in [
        "proc", "sys", "dev", "run", "tmp", "root", "share", "lab", "var/tmp", "var/log", "mnt", "etc", "ro",
        "rw", "new",
    ] {
        fs::create_dir_all(root.join(dir))?;
    }
    let users = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\nguest1:x:1001:1001::/tmp:/bin/bash\nguest2:x:1002:1002::/tmp:/bin/bash\n";
    write(&root.join("etc/passwd"), users, 0o644)?;
    write(
        &root.join("etc/group"),
        "root:x:0:\ntty:x:5:\nkvm:x:104:guest1,guest2\nnogroup:x:65534:\nguest1:x:1001:\nguest2:x:1002:\n",
        0o644,
    )?;
    write(&root.join("etc/hosts"), "127.0.0.1 localhost\n", 0o644)?;
    write(&root.join("etc/hostname"), &format!("{name}\n"), 0o644)?;
    write(&root.join("root/.bashrc"), "PS1='\\h:\\w# '\nalias ll='ls -l'\n", 0o644)?;
    for (link, to) in [
        ("usr/bin/sh", "bash"),
        ("usr/bin/awk", "gawk"),
        ("usr/bin/nc", "nc.openbsd"),
        ("usr/sbin/iptables", "iptables-nft"),
        ("usr/bin/vi", "vim.tiny"),
    ] {
        let path = root.join(link);
        let there = path.parent().is_some_and(|p| p.join(to).exists());
        if there && !path.exists() {
            if path.is_symlink() {
                fs::remove_file(&path)?;
            }
            symlink(to, path)?;
        }
    }
    let mut ldconfig = Command::new("/sbin/ldconfig");
    output(ldconfig.arg("-r").arg(root)).map(drop)
}

fn copy_modules(from: &Path, to: &Path, left_out: &[&str]) -> Result<()> {
    let mut todo = vec![PathBuf::new()];
    while let Some(below) = todo.pop() {
        fs::create_dir_all(to.join(&below))?;
        for entry in fs::read_dir(from.join(&below))? {
            let path = below.join(entry?.file_name());
            if left_out.iter().any(|l| path == Path::new(l)) {
                continue;
            }
            if from.join(&path).is_dir() {
                todo.push(path);
            } else {
                fs::copy(from.join(&path), to.join(&path))?;
            }
        }
    }
    Ok(())
}

/// Writes the module index of `target` with the kmod that was unpacked into `tools`.
pub(crate) fn depmod(modules: &Path, target: &Path, tools: &Path, base: &Path, release: &str) -> Result<()> {
    for list in ["modules.order", "modules.builtin", "modules.builtin.modinfo"] {
        fs::copy(modules.join(list), target.join(list))?;
    }
    let lib = tools.join("usr/lib/x86_64-linux-gnu");
    let mut command = Command::new(tools.join("usr/lib64/ld-linux-x86-64.so.2"));
    command
        .arg("--argv0")
        .arg("depmod")
        .arg("--library-path")
        .arg(lib)
        .arg(tools.join("usr/bin/kmod"))
        .arg("-b")
        .arg(base)
        .arg(release);
    output(&mut command).map(drop)
}

fn initrd(root: &Path, init: &str, modules: &[(String, PathBuf)]) -> Result<Vec<u8>> {
    let mut a = Archive::new();
    for dir in ["proc", "sys", "tmp", "ro", "rw", "new", "sbin", "usr/bin", "usr/sbin", "root"] {
        a.folder(dir);
    }
    a.character("dev/console", 5, 1).character("dev/null", 1, 3).character("dev/kmsg", 1, 11);
    let busybox = root.join("usr/bin/busybox");
    a.file(
        "bin/busybox",
        0o755,
        &fs::read(&busybox).with_context(|| format!("Can't read {}", busybox.display()))?,
    );
    a.file("init", 0o755, init.as_bytes());
    let mut order = String::new();
    for (name, path) in modules {
        a.file(&format!("modules/{name}.ko"), 0o644, &fs::read(path)?);
        order.push_str(name);
        order.push('\n');
    }
    a.file("modules/order", 0o644, order.as_bytes());
    Ok(a.finish())
}

/// Creates a file system image of a tree, with some spare room.
pub(crate) fn ext4(tree: &Path, image: &Path, label: &str, spare_percent: u64) -> Result<()> {
    let text =
        String::from_utf8_lossy(&output(Command::new("du").args(["-sm", "--apparent-size"]).arg(tree))?)
            .into_owned();
    let apparent: u64 =
        text.split_whitespace().next().and_then(|n| n.parse().ok()).context("du printed no number")?;
    let text = String::from_utf8_lossy(&output(Command::new("du").arg("-sm").arg(tree))?).into_owned();
    let used: u64 =
        text.split_whitespace().next().and_then(|n| n.parse().ok()).context("du printed no number")?;
    let size = apparent.max(used) * (100 + spare_percent) / 100 + 32;
    let part = image.with_extension("part");
    if part.exists() {
        fs::remove_file(&part)?;
    }
    let mut command = Command::new("mke2fs");
    command.env("PATH", std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin");
    command.args([
        "-q",
        "-F",
        "-t",
        "ext4",
        "-O",
        "^has_journal,^metadata_csum",
        "-E",
        "root_owner=0:0,lazy_itable_init=0",
        "-m",
        "0",
        "-L",
        label,
        "-d",
    ]);
    output(command.arg(tree).arg(&part).arg(format!("{size}M")))?;
    fs::rename(&part, image).with_context(|| format!("Can't put {} in place", image.display()))
}
