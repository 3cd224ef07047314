/* Fork storms for tests of the keeper: KIND is "bomb" (each process forks without end), "mortal" (each forks two and exits)
 * or "comet" (each forks one and exits), with "-session" (each leads a session of its own) and "-ignore" (the kernel reaps
 * their children). Run it in a pid namespace, with a limit of processes. */
#include <signal.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "";
    int most = strstr(kind, "comet") ? 1 : strstr(kind, "mortal") ? 2 : 0, made = 0;
    if (strstr(kind, "ignore"))
        signal(SIGCHLD, SIG_IGN);
    for (;;) {
        pid_t pid = fork();
        made = pid == 0 ? 0 : pid > 0 ? made + 1 : made;
        if (pid == 0 && strstr(kind, "session"))
            setsid();
        if (most && made >= most)
            return 0;
    }
}
