# storm.pl COUNTER [setsid]: fork and exit without end, counted in a file, until COUNTER.over is there.
# As root it becomes an ordinary user first: a job that stays root can do anything.
use POSIX ();
my ($counter, $how) = @ARGV;
open(my $out, ">", $counter) or die; chmod 0777, $counter;
$out->autoflush(1);
if ($> == 0) { POSIX::setuid(65534); }
for (my $i = 0; $i < 10_000_000; $i++) {
    my $child = fork();
    exit 0 if $child;
    sleep 1 unless defined $child;
    POSIX::setsid() if $how;
    exit 0 if -e "$counter.over";
    if ($i % 10 == 0) { seek($out, 0, 0); print $out "$i\n"; }
}
