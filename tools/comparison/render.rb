# Renders a release's jobs as a Director does. Reads a JSON document from standard input and writes another document:
# {jobs: [{name, spec, templates: {path: text}}], values: {job: {property: value}}, address, pem, key}
#   -> [{name, files: {path: text}, guessed: [name], error}]
require 'erb'
require 'json'
require 'ostruct'
require 'yaml'
require 'base64'
require 'digest'
require 'ipaddr'
require 'securerandom'
require 'uri'
require 'shellwords'

class UnknownProperty < StandardError
  attr_reader :names
  def initialize(names)
    @names = names
    super("no value for #{names.join(', ')}")
  end
end

class UnknownLink < StandardError; end

# The type of `spec` and `properties` in templates. Each level is an OpenStruct whose members can also be read as in a Hash.
class Deep < OpenStruct
  def self.of(value)
    case value
    when Hash then new(value.to_h { |key, member| [key, of(member)] })
    when Array then value.map { |member| of(member) }
    else value
    end
  end

  def [](name) = to_h[name.to_sym]
  def methods(*) = super
end

# Networks by name. A name that does not exist returns the default network.
class Networks < Deep
  def method_missing(name, *) = name.end_with?('=') ? super : to_h[:default]
end

class Otherwise
  def initialize(context, taken) = (@context, @taken = context, taken)

  def else
    yield unless @taken
  end

  def else_if_p(*names, &block) = @taken ? self : @context.if_p(*names, &block)
  def else_if_link(name, &block) = @taken ? self : @context.if_link(name, &block)
end

module Lookup
  UNDEFINED = Object.new

  def p(names, default = UNDEFINED)
    names = Array(names)
    names.each do |name|
      value = __look(name)
      return value unless value.nil?
    end
    return default unless default.equal?(UNDEFINED)
    raise UnknownProperty, names
  end

  def if_p(*names)
    values = names.map { |name| __look(name) }
    return Otherwise.new(self, false) if values.any?(&:nil?)
    yield(*values)
    Otherwise.new(self, true)
  end

  def lookup_property(_, name) = __look(name)

  def __look(name)
    value = name.to_s.split('.').inject(@properties) { |at, key| at.is_a?(Hash) ? at[key] : nil }
    Lookup.missing << name.to_s if value.nil?
    value
  end

  def self.missing = @missing ||= []
end

class Link
  include Lookup
  attr_reader :instances, :address, :properties
  def initialize(properties, address)
    @properties = properties
    @address = address
    member = { name: 'peer', index: 0, id: 'peer-id', az: 'z1', address: address, bootstrap: true }
    @instances = [OpenStruct.new(member)]
  end

  def deployment_name = 'dep'
  def group_name = 'group'
  def [](name) = { 'instances' => @instances, 'properties' => @properties, 'address' => @address }[name.to_s]
end

class Context
  include Lookup
  attr_reader :name, :index, :properties, :raw_properties, :spec
  def initialize(job, properties, links, address)
    @properties = properties
    @links = links
    network = { 'ip' => address, 'netmask' => '255.255.255.0', 'gateway' => '10.244.0.1', 'type' => 'manual',
                'dns' => ['10.244.0.1'], 'default' => %w[dns gateway], 'cloud_properties' => {},
                'dns_record_name' => "0.group.default.dep.bosh" }
    @raw_spec = { 'name' => 'group', 'index' => 0, 'id' => 'instance-id', 'az' => 'z1', 'bootstrap' => true,
                  'address' => address, 'ip' => address, 'deployment' => 'dep', 'persistent_disk' => 0,
                  'networks' => { 'default' => network }, 'job' => { 'name' => 'group', 'template' => job },
                  'release' => { 'name' => 'release', 'version' => '1' }, 'dns_domain_name' => 'bosh',
                  'template_hashes' => {}, 'env' => {}, 'uptime' => 0, 'links' => {}, 'properties' => properties }
    @spec = Deep.of(@raw_spec)
    @spec.networks = Networks.new(default: @spec.networks.default)
    @name = 'group'
    @index = 0
  end

  def __rendered(text)
    @raw_properties = @properties
    shown = Context.instance_method(:properties)
    kept, @properties_object = @properties, Deep.of(@properties)
    ERB.new(text, trim_mode: '-').result(binding)
  end

  def properties = @properties_object || @properties
  def job_name = @raw_spec['job']['template']

  def link(name)
    @links[name] || raise(UnknownLink, name)
  end

  def if_link(name)
    found = @links[name]
    return Otherwise.new(self, false) unless found
    yield found
    Otherwise.new(self, true)
  end
end

def put(into, name, value)
  *above, last = name.split('.')
  place = above.inject(into) { |at, key| at[key].is_a?(Hash) ? at[key] : (at[key] = {}) }
  place[last] = value if place.is_a?(Hash) && place[last].nil?
end

def defaults(spec)
  (spec['properties'] || {}).each_with_object({}) do |(name, member), all|
    put(all, name, member.is_a?(Hash) ? Marshal.load(Marshal.dump(member['default'])) : nil)
  end
end

def guess(name, pem)
  case name
  when /private_?key|(?<!public)[._-]key$/i then $private_key
  when /(^|[._-])(ca|cert|certs|certificate|ca_cert|public_key|crt|pem)s?$/i, /cert(?!ain)/i then pem
  when /port$/i then 12_345
  when /databases$|roles$/i then %w[cc uaa default admin].map { |tag| member(tag) }
  when /driver|(db_?|database\.)(scheme|type)$|adapter/i then 'mysql'
  when /(instances|servers|hosts|machines|addresses|ips|nodes|peers|urls|members)$/i then ['127.0.0.1']
  when /(url|uri|endpoint)$/i then 'http://127.0.0.1:12345'
  when /enabled?$|skip|disable|^use_/i then false
  when /timeout|interval|(^|[._-])(count|max|min|size|limit|number)([._-]|$)/i then 10
  when /ip$|host|address|domain/i then '127.0.0.1'
  else 'guessed'
  end
end

# Return a guessed entry for a list of databases or roles.
def member(tag) = { 'tag' => tag, 'name' => tag, 'username' => tag, 'password' => 'guessed', 'citext' => true }

# Replace a guessed value whose type caused the error, usually with a list of the values that the template looks for.
# Return the name of the property.
def mend_type(error, text, guessed)
  return unless error.is_a?(NoMethodError) || error.message =~ /array/i
  receiver = error.is_a?(NoMethodError) ? error.receiver : nil
  if receiver.is_a?(Array) && error.name == :each_pair
    name = guessed.keys.reverse.find { |one| guessed[one].equal?(receiver) }
    guessed[name] = {} if name
    return name
  end
  name = guessed.keys.reverse.find { |one| receiver.nil? ? error.message.include?(one[/[^.]+$/]) : guessed[one].equal?(receiver) || guessed[one] == receiver }
  return if name.nil? || guessed[name].is_a?(Array)
  tags = text.scan(/\[['":]+(?:tag|name)['"]?\]\s*==\s*['"](\w+)/).flatten.uniq
  guessed[name] = tags.empty? ? [guessed[name]] : tags.map { |tag| member(tag) }
  name
rescue ArgumentError
  nil
end

def set(into, name, value)
  *above, last = name.split('.')
  above.inject(into) { |at, key| at[key].is_a?(Hash) ? at[key] : (at[key] = {}) }[last] = value
end

def value_of(name, spec, pem)
  member = (spec['properties'] || {})[name]
  example = member['example'] if member.is_a?(Hash)
  return guess(name, pem) if example.nil?
  return example unless example.is_a?(String)
  return example.to_i if name =~ /port$/
  parsed = YAML.respond_to?(:unsafe_load) ? YAML.unsafe_load(example) : YAML.load(example)
  parsed.is_a?(Hash) || parsed.is_a?(Array) ? parsed : example
rescue StandardError
  example
end

# Return the names of the properties without a value that caused an error. They are the names in the error's message or,
# if it contains none, the name that was looked up last.
def to_blame(error, spec, properties, guessed)
  return error.names.first(1) if error.is_a?(UnknownProperty)
  named = (spec['properties'] || {}).keys.select do |name|
    error.message =~ /(?<![\w.])#{Regexp.escape(name)}(?![\w.]*\w)/ &&
      name.split('.').inject(properties) { |at, key| at.is_a?(Hash) ? at[key] : nil }.nil?
  end
  named = Lookup.missing.last(1) if named.empty?
  named.reject { |name| guessed.key?(name) }
end

def links_of(spec, specs, address, pem, extra, needed)
  (spec['consumes'] || []).each_with_object({}) do |wanted, all|
    next if wanted['optional'] && !needed.include?(wanted['name'])
    properties = {}
    specs.each do |other|
      (other['provides'] || []).each do |given|
        next unless given['type'] == wanted['type']
        known = defaults(other)
        (given['properties'] || []).each do |name|
          value = name.split('.').inject(known) { |at, key| at.is_a?(Hash) ? at[key] : nil }
          put(properties, name, value.nil? ? value_of(name, other, pem) : value)
        end
      end
    end
    (extra || {}).each { |name, value| put(properties, name, value) }
    all[wanted['name']] = Link.new(properties, address)
  end
end

asked = JSON.parse($stdin.read)
$private_key = asked['key']
loaded = asked['jobs'].map do |job|
  spec = YAML.respond_to?(:unsafe_load) ? YAML.unsafe_load(job['spec']) : YAML.load(job['spec'])
  [job, spec.is_a?(Hash) ? spec : {}]
rescue StandardError => e
  [job, { 'broken' => e.message }]
end
$stdout.sync = true
said = $stdout.dup
$stdout.reopen($stderr)
results = loaded.map do |job, spec|
  properties = Marshal.load(Marshal.dump(asked['values'][job['name']] || {}))
  defaults(spec).each do |name, value|
    merge = lambda do |at, key, new|
      if at[key].nil? then at[key] = new
      elsif at[key].is_a?(Hash) && new.is_a?(Hash) then new.each { |k, v| merge.call(at[key], k, v) }
      end
    end
    merge.call(properties, name, value)
  end
  guessed = {}
  begin
    raise spec['broken'] if spec['broken']
    files = {}
    needed = []
    wanted = (spec['templates'] || {}).map { |source, target| ["templates/#{source}", target] } + [%w[monit monit]]
    wanted.each do |source, target|
      text = job['templates'][source]
      raise "#{source}: there is no such file" if text.nil? && source != 'monit'
      begin
        Lookup.missing.clear
        links = links_of(spec, loaded.map(&:last), asked['address'], asked['pem'], guessed, needed)
        context = Context.new(job['name'], properties, links, asked['address'])
        files[target] = context.__rendered((text || '').dup)
      rescue UnknownLink => e
        raise if needed.include?(e.message)
        needed << e.message
        retry
      rescue StandardError, ScriptError, SystemStackError => e
        if (name = mend_type(e, text || '', guessed))
          set(properties, name, guessed[name])
          retry
        end
        names = guessed.size > 60 ? [] : to_blame(e, spec, properties, guessed).reject { |name| guessed.key?(name) }
        names.each do |name|
          guessed[name] = value_of(name, spec, asked['pem'])
          guessed[name] = [] if e.is_a?(NoMethodError) && %i[each map find collect flatten join select compact].include?(e.name) && !guessed[name].respond_to?(e.name)
          guessed[name] = {} if e.is_a?(NoMethodError) && %i[each_pair keys to_h].include?(e.name)
          put(properties, name, guessed[name])
        end
        retry unless names.empty?
        optional = (spec['consumes'] || []).map { |link| link['name'] } - needed
        retry if needed.concat(optional) && optional.any?
        line = (e.backtrace || []).grep(/^\(erb\)/).first.to_s[/:(\d+)/, 1]
        raise "#{source}:#{line}: #{e.message.lines.first.to_s.strip[0, 200]}"
      end
    end
    { name: job['name'], files: files, guessed: guessed.keys, packages: spec['packages'] || [], error: '' }
  rescue StandardError => e
    { name: job['name'], files: {}, guessed: guessed.keys, packages: spec['packages'] || [], error: e.message }
  end
end
text = JSON.generate(results.map { |one| one.merge(files: one[:files].transform_values { |t| t.dup.force_encoding('UTF-8').scrub }) })
said.write(text)
