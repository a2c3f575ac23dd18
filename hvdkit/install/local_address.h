// On which of its addresses a worker can be reached: each host chooses for itself.
//
// Added by hvdkit (hvdkit/install/addresses.py); no part of Horovod's release.
//
// Horovod asks for one interface name that all hosts share, and Gloo ends with a segmentation fault
// where it finds no address. Here a worker takes the first of the named interfaces that its host has;
// without a name, the address from which the rendezvous server is reached, since that way leads to the
// other hosts.

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace horovod {
namespace common {
namespace {

std::string ToText(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  return getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0
             ? std::string(text)
             : std::string();
}

// Returns the address that packets to a host would come from, or "" if there is no way to it.
std::string AddressOnTheWayTo(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) {
    return "";
  }
  std::string text;
  for (auto* one = found; one != nullptr && text.empty(); one = one->ai_next) {
    auto probe = socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol);
    if (probe == -1) {
      continue;
    }
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    // Connecting a datagram socket sends nothing.
    if (connect(probe, one->ai_addr, one->ai_addrlen) == 0 &&
        getsockname(probe, reinterpret_cast<sockaddr*>(&own), &length) == 0) {
      text = ToText(reinterpret_cast<sockaddr*>(&own), length);
    }
    close(probe);
  }
  freeaddrinfo(found);
  return text;
}

// Returns the first of the names, separated by commas, that is an interface with an IPv4 address here.
std::string FirstInterface(const std::string& names) {
  std::vector<std::string> there;
  std::string described;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) == 0) {
    for (auto* one = all; one != nullptr; one = one->ifa_next) {
      if (one->ifa_addr == nullptr) {
        continue;
      }
      // One that is not set up has a link-local address of IPv6, too.
      if (one->ifa_addr->sa_family == AF_INET) {
        there.emplace_back(one->ifa_name);
        described += (described.empty() ? "" : ", ") + there.back() + " " +
                     ToText(one->ifa_addr, sizeof(sockaddr_in));
      }
    }
    freeifaddrs(all);
  }
  std::stringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    for (const auto& one : there) {
      if (one == name) {
        return name;
      }
    }
  }
  char host[NI_MAXHOST] = "this host";
  gethostname(host, sizeof(host) - 1);
  throw std::runtime_error("HOROVOD_GLOO_IFACE=" + names + ": " + host +
                           " has no such network interface with an IPv4 address; it has " + described +
                           ". Name one for each host (horovodrun --network-interfaces eth0,ib0), "
                           "or none: then the way to the launcher decides");
}

// Returns what Gloo's device is made from: an interface or an address.
attr ChooseAddress(const std::string& interfaces) {
  attr chosen;
  if (!interfaces.empty()) {
    chosen.iface = FirstInterface(interfaces);
    return chosen;
  }
  if (const char* server = std::getenv(HOROVOD_GLOO_RENDEZVOUS_ADDR)) {
    chosen.hostname = AddressOnTheWayTo(server);
    if (chosen.hostname.empty()) {
      throw std::runtime_error(std::string("no way leads to the launcher at ") + server +
                               " (HOROVOD_GLOO_RENDEZVOUS_ADDR)");
    }
    return chosen;
  }
  // Without a launcher's address, as under MPI: this host's name, if others can use what it stands
  // for; else the address of the default route. 192.0.2.1 is nobody's (RFC 5737).
  char name[NI_MAXHOST] = "";
  gethostname(name, sizeof(name) - 1);
  for (const auto& host : {std::string(name), std::string("192.0.2.1")}) {
    auto address = AddressOnTheWayTo(host);
    if (!address.empty() && address.compare(0, 4, "127.") != 0 && address != "::1") {
      chosen.hostname = address;
      return chosen;
    }
  }
  chosen.hostname = "127.0.0.1";
  return chosen;
}

} // namespace
} // namespace common
} // namespace horovod

