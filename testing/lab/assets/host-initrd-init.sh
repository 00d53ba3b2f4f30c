#!/bin/busybox sh
# First program of an emulated host: finds its root file system and hands over.
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
for m in $(cat /modules/order); do insmod /modules/$m.ko || echo "lab: module $m did not load"; done
n=0
while [ ! -b /dev/vda ] && [ $n -lt 100 ]; do n=$((n+1)); usleep 50000; done
mkdir -p /ro /rw /new
mount -t ext4 -o ro,noatime /dev/vda /ro || { echo "LAB-L1 no root"; poweroff -f; }
mount -t tmpfs -o size=75% rw /rw
mkdir -p /rw/upper /rw/work
mount -t overlay -o lowerdir=/ro,upperdir=/rw/upper,workdir=/rw/work,metacopy=off root /new
umount /proc
mount --move /dev /new/dev
exec switch_root /new /sbin/lab-init
