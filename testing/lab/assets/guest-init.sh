#!/bin/busybox sh
# First program of a Debian guest. Kernel command line:
#   lab.root=no       don't look for a root disk        lab.end=poweroff|reboot|halt|shell  what to do at the end
#   lab.modules=no    load no modules                   lab.arg=...  handed to the script as $LAB_ARG
#   lab.early=1       say 'LAB-L2 early' before anything else is done
# A second cpio archive appended to the initrd may bring /lab/script; it runs in the root disk when there is one.
/bin/busybox mount -t proc proc /proc
/bin/busybox echo "LAB-L2 init $(/bin/busybox cut -d' ' -f1 /proc/uptime)"
/bin/busybox --install -s /bin
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/root TERM=linux
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm /run
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp /tmp
LAB_ARG=; end=poweroff; root=auto; modules=yes
for w in $(cat /proc/cmdline); do case $w in
  lab.arg=*) LAB_ARG=${w#lab.arg=} ;;
  lab.end=*) end=${w#lab.end=} ;;
  lab.root=*) root=${w#lab.root=} ;;
  lab.modules=*) modules=${w#lab.modules=} ;;
esac; done
export LAB_ARG
if [ $modules = yes ]; then
  for m in $(cat /modules/order); do insmod /modules/$m.ko 2>/dev/null || echo "LAB-L2 module $m did not load"; done
fi
ip link set lo up
echo "LAB-L2 user space $(cut -d' ' -f1 /proc/uptime) cpus $(grep -c ^processor /proc/cpuinfo) kernel $(uname -r)"
# The power button arrives as a key event.
if [ -e /dev/input/event0 ] || ls /dev/input/event* >/dev/null 2>&1; then
  for e in /dev/input/event*; do
    ( dd if=$e of=/dev/null bs=24 count=1 2>/dev/null && echo "LAB-L2 power button" && poweroff -f ) &
  done
fi
inside=
if [ "$root" = auto ]; then
  for d in /sys/block/vd* /sys/block/sd* /sys/block/nvme*; do
    [ -e "$d" ] || continue
    dev=/dev/${d##*/}
    [ "$(dd if=$dev bs=1 skip=1144 count=8 2>/dev/null)" = labguest ] || continue
    mkdir -p /ro /rw /new
    mount -t ext4 -o ro,noatime $dev /ro || continue
    mount -t tmpfs rw /rw; mkdir -p /rw/u /rw/w
    if mount -t overlay -o lowerdir=/ro,upperdir=/rw/u,workdir=/rw/w root /new; then inside=/new; fi
    break
  done
fi
rc=0
if [ -e /lab/script ]; then
  chmod +x /lab/script
  if [ -n "$inside" ]; then
    mkdir -p /new/lab; cp -a /lab/. /new/lab/
    for x in proc sys dev; do mount --bind /$x /new/$x; done
    mount --bind /dev/pts /new/dev/pts; mount --bind /dev/shm /new/dev/shm
    mount -t tmpfs tmp /new/tmp
    echo "LAB-L2 script $(cut -d' ' -f1 /proc/uptime)"
    chroot /new /lab/script; rc=$?
  else
    echo "LAB-L2 script $(cut -d' ' -f1 /proc/uptime)"
    /lab/script; rc=$?
  fi
fi
echo "LAB-L2 exit $rc $(cut -d' ' -f1 /proc/uptime)"
case $end in
  reboot) sync; reboot -f ;;
  halt) while :; do sleep 1000; done ;;
  shell) setsid cttyhack sh; poweroff -f ;;
  *) sync; poweroff -f ;;
esac
while :; do sleep 1000; done
