# storm.pl COUNTER [setsid [wipe]]: fork and exit repeatedly, until the file COUNTER is deleted or a minute has passed.
# COUNTER contains the number of forks. With "setsid", each child starts a session. With "wipe", the program has no
# environment, ignores SIGTERM, and pauses after every hundred forks.
# If run as root, it becomes an ordinary user, because a job that stays root could do anything.
use POSIX ();
my ($counter, $session, $wipe) = @ARGV;
if ($wipe && %ENV) { %ENV = (); exec($^X, $0, @ARGV); }
open(my $out, ">", $counter) or die;
$out->autoflush(1);
if ($> == 0) { POSIX::setuid(65534); }
$SIG{TERM} = "IGNORE" if $wipe;
for (my $i = 0; time() < $^T + 60; $i++) {
    my $child = fork();
    exit 0 if $child;
    sleep 1 unless defined $child;
    POSIX::setsid() if $session;
    # Check the open file and not its path, because an ordinary user cannot enter root's directories.
    exit 0 unless (stat $out)[3];
    if ($i % 10 == 0) { seek($out, 0, 0); print $out "$i\n"; }
    if ($wipe && $i % 100 == 0) { select(undef, undef, undef, 0.3); }
}
