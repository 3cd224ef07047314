#!/usr/bin/perl
# An HTTP server that counts its visits in a file on the persistent disk.
use strict;
use warnings;
use IO::Socket::INET;

my ( $greeting, $store ) = @ARGV;
my $server = IO::Socket::INET->new( LocalPort => 8080, Listen => 5, ReuseAddr => 1 ) or die "cannot listen: $!\n";
while ( my $client = $server->accept ) {
    while ( my $line = <$client> ) { last if $line =~ /^\r?\n$/ }
    my $visits = 0;
    if ( open my $old, '<', $store ) { $visits = <$old>; }
    $visits++;
    open my $new, '>', $store or die "cannot write $store: $!\n";
    print $new $visits;
    close $new;
    print $client "HTTP/1.0 200 OK\r\n\r\n$greeting, visit $visits\n";
    close $client;
}
