# storm.pl COUNTER [setsid [wipe]]: fork and exit, counted in a file, until COUNTER is unlinked or a minute is over.
# With "wipe" it has no environment, ignores TERM, and rests a while after each hundred.
# As root it becomes an ordinary user first: a job that stays root can do anything.
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
    # By the open file: an ordinary user cannot look into root's directories.
    exit 0 unless (stat $out)[3];
    if ($i % 10 == 0) { seek($out, 0, 0); print $out "$i\n"; }
    if ($wipe && $i % 100 == 0) { select(undef, undef, undef, 0.3); }
}
