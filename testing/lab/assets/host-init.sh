#!/bin/sh
# PID 1 of an emulated host.
export PATH=/share/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=linux LANG=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mkdir -p /dev/pts /dev/shm /dev/mqueue /run /tmp /share /lab
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777,size=75% tmp /tmp
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null
# Guest RAM is a memfd: with 4 KiB pages a boot takes 18,000 page faults of KVM more, and two to three times as long. QEMU's
# anonymous memory gets huge pages by Debian's default; this gives shared memory the same where it is asked for.
echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled
opts=
name=lab
for w in $(cat /proc/cmdline); do case $w in
  kvm_amd.*) opts="$opts ${w#kvm_amd.}" ;;
  lab.name=*) name=${w#lab.name=} ;;
esac; done
hostname "$name"
modprobe -a 9p 9pnet_virtio virtio_console
mount -t 9p -o trans=virtio,version=9p2000.L,cache=none,msize=512000 share /share || echo "LAB-L1 no share"
[ -b /dev/vdb ] && mount -o ro,noatime /dev/vdb /lab
modprobe kvm-amd $opts || echo "LAB-L1 no kvm"
modprobe -a virtio_net tun
ip link set lo up
if [ -s /share/.lab/nics ]; then
  while read -r mac nic addr; do
    n=0
    while [ $n -lt 40 ]; do
      for d in /sys/class/net/*; do
        [ "$(cat "$d/address")" = "$mac" ] || continue
        old=${d##*/}
        [ "$old" = "$nic" ] || ip link set "$old" name "$nic"
        [ "$addr" = - ] || ip addr add "$addr" dev "$nic"
        ip link set "$nic" up
        n=100
      done
      n=$((n+1)); [ $n -ge 100 ] || sleep 0.05
    done
  done < /share/.lab/nics
fi
echo "LAB-L1 ready $(cut -d' ' -f1 /proc/uptime) $(uname -r)"
cd /root
n=0
while [ ! -e /dev/virtio-ports/lab ] && [ $n -lt 100 ]; do
  n=$((n+1))
  mkdir -p /dev/virtio-ports
  for p in /sys/class/virtio-ports/*; do
    [ "$(cat "$p/name" 2>/dev/null)" = lab ] && ln -sf "/dev/${p##*/}" /dev/virtio-ports/lab
  done
  [ -e /dev/virtio-ports/lab ] || sleep 0.05
done
while :; do
  /share/.lab/lab agent /dev/virtio-ports/lab
  echo "LAB-L1 agent ended: $?"
  sleep 1
done
