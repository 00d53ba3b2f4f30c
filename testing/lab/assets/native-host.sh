#!/bin/sh
# First program of a native host: this machine in namespaces of its own (mounts, network, processes), with the same root
# file system as an emulated host. Run by `unshare`, as root.
# Arguments: root image, guest disk, folder of the host, its name.
set -e
root=$1 disk=$2 home=$3 name=$4
port=$home/port
n=0
while [ ! -e "$port" ] && [ $n -lt 100 ]; do n=$((n+1)); sleep 0.05; done
[ -e "$port" ] || { echo "LAB native: no command port"; exit 1; }

mount --make-rprivate /
stage=$home/stage
mkdir -p "$stage"
mount -t tmpfs -o mode=755 stage "$stage"
mkdir "$stage/ro" "$stage/rw" "$stage/new"
mount -o ro,noatime,loop "$root" "$stage/ro"
mkdir "$stage/rw/upper" "$stage/rw/work"
mount -t overlay -o "lowerdir=$stage/ro,upperdir=$stage/rw/upper,workdir=$stage/rw/work,metacopy=off" root "$stage/new"
new=$stage/new

# Only devices that are harmless or wanted: none of this machine's disks.
mkdir -p "$new/dev"
mount -t tmpfs -o mode=755 dev "$new/dev"
for node in null zero full random urandom tty kvm; do
    [ -e "/dev/$node" ] && { : > "$new/dev/$node"; mount --bind "/dev/$node" "$new/dev/$node"; }
done
if [ -e /dev/net/tun ]; then
    mkdir "$new/dev/net"
    : > "$new/dev/net/tun"
    mount --bind /dev/net/tun "$new/dev/net/tun"
fi
mkdir "$new/dev/pts" "$new/dev/shm"
mount -t devpts -o newinstance,gid=5,mode=620,ptmxmode=666 devpts "$new/dev/pts"
ln -s pts/ptmx "$new/dev/ptmx"
ln -s /proc/self/fd "$new/dev/fd"
mount -t tmpfs -o mode=1777 shm "$new/dev/shm"
# The empty disk of an emulated host: a loop device. Detached while descriptor 9, which the agent inherits, holds it
# open, so that it goes when the host does.
: > "$new/dev/vdc"
scratch=$(losetup --find --show "$home/scratch")
mount --bind "$scratch" "$new/dev/vdc"
exec 9<>"$scratch"
losetup --detach "$scratch"

mkdir -p "$new/proc" "$new/sys" "$new/run" "$new/tmp" "$new/share" "$new/lab"
mount -t proc proc "$new/proc"
mount -t sysfs sysfs "$new/sys"
mount -t debugfs debugfs "$new/sys/kernel/debug" 2>/dev/null || true
mount -t tmpfs -o mode=755 run "$new/run"
mount -t tmpfs -o mode=1777 tmp "$new/tmp"
mount --bind "$home/share" "$new/share"
mount -o ro,noatime,loop "$disk" "$new/lab"
: > "$new/dev/lab-port"
mount --bind "$(readlink -f "$port")" "$new/dev/lab-port"
hostname "$name"
ip link set lo up
echo "LAB-L1 ready (native) $(uname -r)"
export PATH=/share/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=linux LANG=C.UTF-8
exec chroot "$new" /share/.lab/lab agent /dev/lab-port
